// The live view: hears what the engine does, keeps the last minutes of it, and shows them.

import { ask, events, hasKey, keyTyped } from "./server.js";
import { drawRate, drawRequests } from "./gantt.js";

const $ = (id) => document.getElementById(id);
const KEPT_SECONDS = 130;
const RATE_SECONDS = 5;
const MAX_LISTED = 30;

const requests = new Map(); // by number
let steps = [];
let clock = { now: 0, heard: 0 };

const now = () => clock.now + (performance.now() - clock.heard) / 1000;

// -- what is heard

function arrived([, number, id, tenant, prompt, limit, samples, arrival]) {
  if (requests.has(number)) return requests.get(number);
  const request = {
    number, id, prompt, arrival, parts: [], waits: "queued", since: arrival, step: -1,
    cached: 0, answer: 0, end: null, reason: null, first: null,
  };
  requests.set(number, request);
  return request;
}

function add(request, kind, begin, end, cached) {
  const last = request.parts.at(-1);
  if (last?.kind === kind && kind !== "prefill" && begin - last.end < 0.001) last.end = end;
  else request.parts.push({ kind, begin, end, cached });
}

function stepped(entry) {
  const [, , begin, end, , running, waiting, free, fenced, kept, held, preempted, parts] = entry;
  const step = { begin, end, running, waiting, free, fenced, kept, held, prefill: 0, decode: 0, cached: 0 };
  for (const number of preempted) {
    const request = requests.get(number);
    if (request && request.waits === null) [request.waits, request.since] = ["preempted", begin];
  }
  for (const [number, , start, tokens, sampled, isDecode, cached] of parts) {
    step[isDecode ? "decode" : "prefill"] += tokens;
    step.cached += cached;
    const request = requests.get(number);
    if (!request) continue;
    if (request.waits !== null) {
      add(request, request.waits, request.since, begin, 0);
      request.waits = null;
    }
    request.cached += cached;
    request.answer += sampled;
    if (sampled && request.first === null) request.first = end - request.arrival;
    if (isDecode) add(request, "decode", begin, end, 0);
    else add(request, "prefill", begin, end, cached / (start + tokens));
  }
  steps.push(step);
}

function ended([, number, reason, end, answer, cached, first]) {
  const request = requests.get(number);
  if (!request) return;
  if (request.waits !== null) add(request, request.waits, request.since, end, 0);
  Object.assign(request, { waits: null, end, reason, answer, cached, first });
}

function take(update) {
  clock = { now: update.now_seconds, heard: performance.now() };
  state(update.state);
  const [drafted, accepted] = [update.drafted_tokens ?? 0, update.accepted_tokens ?? 0];
  $("accepted").textContent = drafted ? `${many((100 * accepted) / drafted)} %` : "–";
  const { tokens_per_step, fill_ratio } = update.numbers;
  $("per-step").textContent = tokens_per_step ? tokens_per_step.toFixed(1) : "–";
  $("filled").textContent = fill_ratio === null ? "–" : `${many(100 * fill_ratio)} %`;
  if (update.about) document.dispatchEvent(new CustomEvent("about", { detail: update.about }));
  if (update.open) {
    const open = new Set(update.open.map(([entry]) => entry[1]));
    for (const [number, request] of requests) {
      if (request.end === null && !open.has(number)) requests.delete(number);
    }
    for (const [entry, began] of update.open) {
      const request = arrived(entry);
      if (began !== null && request.parts.length === 0 && began > request.arrival) {
        add(request, "queued", request.arrival, began, 0);
        request.waits = null;
      }
    }
  }
  for (const entry of update.log ?? []) {
    if (entry[0] === "step") stepped(entry);
    else if (entry[0] === "arrived") arrived(entry);
    else ended(entry);
  }
  const oldest = clock.now - KEPT_SECONDS;
  steps = steps.filter((step) => step.end > oldest);
  for (const [number, request] of requests) {
    if (request.end !== null && request.end < oldest) requests.delete(number);
    else if (request.parts[0]?.end < oldest) request.parts = request.parts.filter((part) => part.end >= oldest);
  }
}

function state(text) {
  if ($("state").textContent === text) return;
  $("state").textContent = text;
  $("state").className = `state ${text}`;
}

async function listen() {
  for (;;) {
    try {
      const response = await ask("live");
      requests.clear();
      steps = [];
      for await (const data of events(response)) take(JSON.parse(data));
      if ($("state").textContent === "open") state("reconnecting");
    } catch (error) {
      const wanted = { 401: "wants a key", 403: "wants an operator's key" }[error.status];
      state(wanted ?? "reconnecting");
      if (wanted !== undefined) {
        await keyTyped();
        continue;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, 1500));
  }
}

// -- what is shown

const many = (number) => Math.round(number).toLocaleString("en");

function shown() {
  const time = now();
  const seconds = Number($("window").value);
  const from = time - seconds;
  const visible = [...requests.values()]
    .filter((request) => request.arrival < time && (request.end ?? time) >= from)
    .sort((one, other) => one.number - other.number);
  const inWindow = steps.filter((step) => step.end > from);
  const rows = drawRequests($("gantt"), visible, time, seconds);
  drawRate($("rate"), inWindow, time, seconds);
  const hidden = visible.length - rows;
  $("gantt-said").textContent =
    `${visible.length} in the last ${seconds} s` + (hidden ? `; the first ${hidden} aren't drawn` : "");
  numbers(inWindow, time);
  if ($("listed").open) table([...requests.values()].slice(-MAX_LISTED).reverse());
}

function numbers(inWindow, time) {
  const last = steps.at(-1);
  if (!last) return;
  const sum = (list, name) => list.reduce((total, step) => total + step[name], 0);
  const lately = inWindow.filter((step) => step.end > time - RATE_SECONDS);
  const isIdle = ![...requests.values()].some((request) => request.end === null);
  $("running").textContent = isIdle ? "0" : many(last.running);
  $("waiting").textContent = isIdle ? "0" : many(last.waiting);
  $("decode-rate").textContent = `${many(sum(lately, "decode") / RATE_SECONDS)} tok/s`;
  $("prefill-rate").textContent = `${many(sum(lately, "prefill") / RATE_SECONDS)} tok/s`;
  const [cached, computed] = [sum(inWindow, "cached"), sum(inWindow, "prefill")];
  $("hits").textContent = cached + computed ? `${many((100 * cached) / (cached + computed))} %` : "–";
  const took = lately.reduce((total, step) => total + step.end - step.begin, 0);
  $("step-time").textContent = lately.length ? `${((1000 * took) / lately.length).toFixed(1)} ms` : "–";
  const pages = { held: last.held, cached: last.kept, fenced: last.fenced, free: last.free };
  for (const [name, count] of Object.entries(pages)) {
    $(name).textContent = many(count);
    $("pages").querySelector(`.${name}`).style.flexGrow = count;
  }
}

function table(listed) {
  const rows = listed.map((request) => {
    const row = document.createElement("tr");
    const where = request.end !== null ? request.reason : (request.waits ?? "runs");
    const first = request.first === null ? "–" : `${request.first.toFixed(3)} s`;
    const name = request.id || `request ${request.number}`;
    for (const text of [name, where, request.prompt, request.cached, request.answer, first]) {
      const cell = document.createElement("td");
      cell.textContent = text;
      row.append(cell);
    }
    row.firstChild.title = name;
    return row;
  });
  $("rows").replaceChildren(...rows);
}

const calm = matchMedia("(prefers-reduced-motion: reduce)");
let drawn = 0;
function draw(at) {
  const due = at - drawn > (calm.matches ? 1000 : 100);
  if (due && clock.heard && !$("pause").checked) {
    drawn = at;
    shown();
  }
  requestAnimationFrame(draw);
}

$("trace").addEventListener("click", async (event) => {
  if (!hasKey()) return; // the link does
  event.preventDefault();
  const url = URL.createObjectURL(await (await ask("trace")).blob());
  const link = Object.assign(document.createElement("a"), { href: url, download: "aioserve-trace.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
});

requestAnimationFrame(draw);
listen();
