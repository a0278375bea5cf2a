// Draws requests over time, and tokens per second.

const MIN_ROW = 6;
const MAX_ROW = 20;
const HEAD = 5;
const FOOT = 18;

// A context whose unit is a CSS pixel, with the colours of the page.
function begin(canvas) {
  const scale = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
  if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  const style = getComputedStyle(canvas);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  context.font = `11px ${style.fontFamily}`;
  return { context, width, height, colour };
}

function axis({ context, width, height, colour }, from, seconds, left) {
  const every = seconds <= 10 ? 2 : seconds <= 30 ? 5 : 20;
  const x = (t) => left + ((t - from) / seconds) * (width - left);
  context.lineWidth = 1;
  context.textAlign = "center";
  context.textBaseline = "bottom";
  for (let ago = every; ago < seconds; ago += every) {
    const at = Math.round(x(from + seconds - ago)) + 0.5;
    context.strokeStyle = colour("line");
    context.beginPath();
    context.moveTo(at, 0);
    context.lineTo(at, height - FOOT);
    context.stroke();
    context.fillStyle = colour("quiet");
    context.fillText(`−${ago} s`, at, height - 3);
  }
  return x;
}

// How many of `requests`, those of the window in order of arrival, have a row.
export function drawRequests(canvas, requests, now, seconds) {
  const drawing = begin(canvas);
  const { context, width, height, colour } = drawing;
  const from = now - seconds;
  const left = 30;
  const x = axis(drawing, from, seconds, left);
  const room = height - HEAD - FOOT;
  const rows = requests.slice(-Math.floor(room / MIN_ROW));
  const row = Math.max(MIN_ROW, Math.min(MAX_ROW, room / Math.max(1, rows.length)));
  context.save();
  context.textBaseline = "middle";
  context.textAlign = "right";
  context.fillStyle = colour("quiet");
  const every = Math.max(1, Math.ceil(12 / row));
  rows.forEach((request, index) => {
    if (index % every === 0) context.fillText(String(request.number), left - 5, HEAD + (index + 0.5) * row);
  });
  context.beginPath();
  context.rect(left, 0, width - left, height - FOOT);
  context.clip();
  rows.forEach((request, index) => {
    const top = HEAD + index * row;
    for (const part of request.parts) {
      if (part.end >= from) box(drawing, part, x(part.begin), x(part.end), top, row);
    }
    if (request.waits !== null && request.end === null) {
      const waiting = { kind: request.waits, cached: 0 };
      box(drawing, waiting, x(request.since), x(now), top, row);
    }
    if (request.end !== null) {
      context.fillStyle = colour(request.reason === "error" ? "bad" : "text");
      context.fillRect(x(request.end), top + row * 0.1, 1, row * 0.8);
    }
  });
  context.restore();
  return rows.length;
}

function box({ context, colour }, part, begin, end, top, row) {
  const wide = Math.max(end - begin, part.kind === "prefill" ? 3 : 1);
  const full = row * 0.8;
  const bar = (share) => [begin, top + (row - full * share) / 2, wide, full * share];
  if (part.kind === "prefill") {
    context.fillStyle = colour("prefill");
    context.fillRect(...bar(1));
    if (part.cached) {
      // As high as the share of the prompt that came from the cache.
      const high = Math.max(2, full * part.cached);
      context.fillStyle = colour("cached");
      context.fillRect(begin, top + (row + full) / 2 - high, wide, high);
    }
  } else if (part.kind === "decode") {
    context.fillStyle = colour("decode");
    context.fillRect(...bar(0.6));
  } else {
    const [left, y, width, height] = bar(part.kind === "queued" ? 0.4 : 0.6);
    context.strokeStyle = colour(part.kind);
    context.lineWidth = 1;
    context.strokeRect(left + 0.5, y + 0.5, Math.max(0.5, width - 1), Math.max(1, height - 1));
    if (part.kind === "preempted") hatch(context, left, y, width, height);
  }
}

function hatch(context, left, top, width, height) {
  context.save();
  context.beginPath();
  context.rect(left, top, width, height);
  context.clip();
  context.beginPath();
  for (let at = left - height; at < left + width; at += 5) {
    context.moveTo(at, top + height);
    context.lineTo(at + height, top);
  }
  context.stroke();
  context.restore();
}

// Bars of prefilled and decoded tokens per second. The highest is told.
export function drawRate(canvas, steps, now, seconds) {
  const drawing = begin(canvas);
  const { context, width, height, colour } = drawing;
  const from = now - seconds;
  const left = 30;
  const x = axis(drawing, from, seconds, left);
  const bin = seconds / 60;
  const bins = new Map();
  for (const step of steps) {
    const index = Math.floor(step.end / bin);
    const sums = bins.get(index) ?? { decode: 0, prefill: 0 };
    sums.decode += step.decode;
    sums.prefill += step.prefill;
    bins.set(index, sums);
  }
  let most = 1;
  for (const sums of bins.values()) most = Math.max(most, (sums.decode + sums.prefill) / bin);
  const room = height - FOOT;
  const high = (tokens) => (tokens / bin / most) * (room - 14);
  context.save();
  context.beginPath();
  context.rect(left, 0, width - left, room);
  context.clip();
  for (const [index, sums] of bins) {
    const begin = x(index * bin);
    const wide = Math.max(1, x((index + 1) * bin) - begin - 1);
    const decode = high(sums.decode);
    const prefill = high(sums.prefill);
    context.fillStyle = colour("decode");
    context.fillRect(begin, room - decode, wide, decode);
    context.fillStyle = colour("prefill");
    context.fillRect(begin, room - decode - prefill, wide, prefill);
  }
  context.restore();
  context.fillStyle = colour("quiet");
  context.textAlign = "left";
  context.textBaseline = "top";
  context.fillText(`at most ${Math.round(most).toLocaleString("en")}`, left + 4, 2);
}
