// Speaks with the server: the key that it may want, errors in its words, events as they come.

const NAME = "aioserve-key";
const form = document.getElementById("key-form");
const field = document.getElementById("key");
let wanted = []; // who waits for a key

export const hasKey = () => sessionStorage.getItem(NAME) !== null;

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// The answer to a request. Where the server wants a key, `ServerError` with status 401, and the
// field for it is shown.
export async function ask(path, { body, signal } = {}) {
  const headers = {};
  const key = sessionStorage.getItem(NAME);
  if (key !== null) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(new URL(path, document.baseURI), {
    method: body === undefined ? "GET" : "POST",
    body: body === undefined ? undefined : JSON.stringify(body),
    headers,
    signal,
    cache: "no-store",
  });
  if (response.ok) return response;
  if (response.status === 401) {
    sessionStorage.removeItem(NAME);
    form.hidden = false;
  }
  throw new ServerError(response.status, await reasonOf(response));
}

async function reasonOf(response) {
  try {
    const { error } = await response.json();
    return String(error.message);
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

// Until somebody has typed a key.
export const keyTyped = () => new Promise((resolve) => wanted.push(resolve));

form.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(NAME, field.value);
  field.value = "";
  form.hidden = true;
  const waiting = wanted;
  wanted = [];
  for (const resolve of waiting) resolve();
});

// Data of each event of a stream, as text.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      const whole = text.split(/\r?\n\r?\n/);
      text = whole.pop();
      for (const event of whole) {
        const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
