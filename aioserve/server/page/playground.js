// The playground: asks for chats and completions. Whatever a model writes is shown as text.

import { ServerError, ask, events, keyTyped } from "./server.js";

const $ = (id) => document.getElementById(id);
const answers = $("answers");
const prompt = $("prompt");
let messages = []; // of the chat so far
let going = null; // AbortController of the answer that comes

const mode = () => document.querySelector("input[name=mode]:checked").value;

function element(kind, className, text) {
  const made = document.createElement(kind);
  made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function turn(className, title) {
  const made = element("article", `turn ${className}`);
  made.append(element("h3", "", title));
  answers.append(made);
  return made;
}

function show(node) {
  const atEnd = answers.scrollHeight - answers.scrollTop - answers.clientHeight < 80;
  return (text) => {
    node.append(text); // a text node, never HTML
    if (atEnd) answers.scrollTop = answers.scrollHeight;
  };
}

// -- what is asked for

function settings() {
  const wanted = {};
  for (const field of document.querySelectorAll(".fields input")) {
    if (field.value === "") continue;
    const isLimit = field.name === "max_tokens" && mode() === "chat";
    wanted[isLimit ? "max_completion_tokens" : field.name] = Number(field.value);
  }
  const stops = $("stops").value.split("\n").filter((line) => line !== "");
  if (stops.length) wanted.stop = stops;
  return wanted;
}

function body(text) {
  const wanted = {
    model: $("model").value,
    stream: true,
    stream_options: { include_usage: true },
    ...settings(),
  };
  if (mode() === "completion") return { ...wanted, prompt: text };
  const system = $("system").value;
  const before = system ? [{ role: "system", content: system }] : [];
  return { ...wanted, messages: [...before, ...messages, { role: "user", content: text }] };
}

// -- one answer

function begin(text) {
  const isChat = mode() === "chat";
  if (isChat) turn("mine", "You").append(element("pre", "", text));
  const made = turn(`going ${mode()}`, $("model").value);
  if (!isChat) made.append(element("pre", "prompt", text));
  const answer = element("pre", "answer");
  made.append(answer);
  answers.scrollTop = answers.scrollHeight;
  return { made, answer, said: "", thought: null, first: null, last: null, usage: null, reason: null };
}

function take(one, chunk) {
  if (chunk.error) throw new ServerError(0, String(chunk.error.message));
  if (chunk.usage) one.usage = chunk.usage;
  for (const choice of chunk.choices ?? []) {
    const delta = choice.delta ?? {};
    const thought = delta.reasoning_content ?? delta.reasoning ?? "";
    const text = choice.text ?? delta.content ?? "";
    if (choice.finish_reason) one.reason = choice.finish_reason;
    if (!text && !thought) continue;
    one.last = performance.now();
    one.first ??= one.last;
    if (thought) {
      if (one.thought === null) {
        one.thought = element("pre", "reasoning");
        one.answer.before(one.thought);
      }
      show(one.thought)(thought);
    }
    if (text) {
      one.said += text;
      show(one.answer)(text);
    }
  }
}

function figures(one, began) {
  const said = [];
  const seconds = (ms) => `${(ms / 1000).toFixed(2)} s`;
  if (one.usage) {
    const cached = one.usage.prompt_tokens_details?.cached_tokens ?? 0;
    const counted = (count, one) => `${count} ${one}${count === 1 ? "" : "s"}`;
    said.push(`${counted(one.usage.prompt_tokens, "prompt token")}, ${cached} cached`);
    said.push(counted(one.usage.completion_tokens, "token"));
  }
  if (one.first !== null) said.push(`first after ${seconds(one.first - began)}`);
  if (one.usage?.completion_tokens > 1 && one.last > one.first) {
    const rate = (one.usage.completion_tokens - 1) / ((one.last - one.first) / 1000);
    said.push(`${rate.toFixed(1)} tokens/s`);
  }
  said.push(`${seconds(performance.now() - began)} in all`);
  if (one.reason) said.push(`ended by ${one.reason}`);
  one.made.append(element("p", "hint figures", said.join(" · ")));
}

async function send() {
  const text = prompt.value;
  if (going !== null || text === "") return;
  $("problem").textContent = "";
  const isChat = mode() === "chat";
  const wanted = body(text);
  going = new AbortController();
  busy(true);
  const one = begin(text);
  prompt.value = "";
  const began = performance.now();
  try {
    const path = isChat ? "v1/chat/completions" : "v1/completions";
    const response = await ask(path, { body: wanted, signal: going.signal });
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      take(one, JSON.parse(data));
    }
  } catch (error) {
    if (error.name === "AbortError") one.reason = "you";
    else {
      one.reason = "an error";
      $("problem").textContent = error.message;
      if (one.said === "") prompt.value ||= text;
    }
  }
  one.made.classList.remove("going");
  figures(one, began);
  if (isChat && one.said !== "") {
    messages.push({ role: "user", content: text }, { role: "assistant", content: one.said });
  }
  answers.scrollTop = answers.scrollHeight;
  going = null;
  busy(false);
}

function busy(is) {
  answers.setAttribute("aria-busy", String(is)); // read out when it is whole
  $("stop").disabled = !is;
  $("send").disabled = is;
  if (!is && document.activeElement === document.body) prompt.focus();
}

// -- what one can do

function switched() {
  const isChat = mode() === "chat";
  $("prompt-label").textContent = isChat ? "Message" : "Text to continue";
  for (const one of document.querySelectorAll(".chat-only")) one.hidden = !isChat;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") going?.abort();
});
$("stop").addEventListener("click", () => going?.abort());
$("clear").addEventListener("click", () => {
  going?.abort();
  messages = [];
  answers.replaceChildren();
  prompt.focus();
});
for (const one of document.querySelectorAll("input[name=mode]")) one.addEventListener("change", switched);

async function start() {
  switched();
  for (;;) {
    try {
      const { data } = await (await ask("v1/models")).json();
      $("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
      $("problem").textContent = "";
      return;
    } catch (error) {
      $("problem").textContent = error.message;
      if (error.status === 401) await keyTyped();
      else await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
}

// The live view hears whether the model can chat.
document.addEventListener("about", ({ detail }) => {
  const chat = document.querySelector("input[value=chat]");
  chat.disabled = !detail.has_chat_template;
  if (chat.disabled && chat.checked) document.querySelector("input[value=completion]").checked = true;
  switched();
});

start();
