"use strict";
// Says what is under the pointer, or what the arrow keys have reached, at once and in one place; and
// unpacks what is downloaded. Without this, browsers show the same titles, and the file is packed.
(() => {
  const box = document.getElementById("readout");
  const tips = new WeakMap();
  let lit = null;

  const show = (hit, x, y) => {
    if (lit !== hit) {
      if (lit) lit.classList.remove("on");
      lit = hit;
      if (hit) hit.classList.add("on");
      box.textContent = hit ? tips.get(hit) : "";
    }
    if (!hit) return;
    const { width, height } = box.getBoundingClientRect();
    const left = Math.min(x + 14, innerWidth - width - 6);
    const top = y + 18 + height > innerHeight ? y - height - 10 : y + 18;
    box.style.left = `${Math.max(4, left)}px`;
    box.style.top = `${Math.max(4, top)}px`;
  };
  const reach = (hit) => {
    hit.scrollIntoView({ block: "nearest", inline: "nearest" });
    const at = hit.getBoundingClientRect();
    show(hit, at.left + at.width / 2, Math.min(at.bottom, innerHeight - 40) - 12);
  };
  const middle = (hit) => {
    const at = hit.getBoundingClientRect();
    return at.left + at.width / 2;
  };
  const rowAbove = (hits, from, step) => {
    // The nearest one in the next picture of the group that has any.
    const own = hits[from].ownerSVGElement;
    let to = from;
    while (hits[to] && hits[to].ownerSVGElement === own) to += step;
    if (!hits[to]) return from;
    const row = hits.filter((hit) => hit.ownerSVGElement === hits[to].ownerSVGElement);
    const x = middle(hits[from]);
    row.sort((a, b) => Math.abs(middle(a) - x) - Math.abs(middle(b) - x));
    return hits.indexOf(row[0]);
  };

  for (const hit of document.querySelectorAll(".hit")) {
    const title = hit.querySelector("title");
    tips.set(hit, title.textContent);
    title.remove();
  }
  for (const title of document.querySelectorAll("svg > title")) {
    // A title would be shown over the readout; as a label it stays for those who can't see.
    const svg = title.parentElement;
    svg.setAttribute("aria-label", title.textContent);
    svg.removeAttribute("aria-labelledby");
    title.remove();
  }
  for (const group of document.querySelectorAll("svg.plot, .lanes")) {
    const hits = [...group.querySelectorAll(".hit")];
    if (!hits.length) continue;
    let at = -1;
    group.setAttribute("tabindex", "0");
    group.addEventListener("keydown", (event) => {
      const sideways = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const across = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      const ends = { Home: 0, End: hits.length - 1 }[event.key];
      if (event.key === "Escape") return show(null);
      if (sideways === undefined && across === undefined && ends === undefined) return;
      if (ends !== undefined) at = ends;
      else if (at < 0) at = 0;
      else if (across && group.matches(".lanes")) at = rowAbove(hits, at, across);
      else at = Math.min(hits.length - 1, Math.max(0, at + (sideways || across)));
      event.preventDefault();
      reach(hits[at]);
    });
    group.addEventListener("blur", () => show(null));
  }
  document.addEventListener("pointermove", (event) => {
    const hit = event.target.closest && event.target.closest(".hit");
    show(hit, event.clientX, event.clientY);
  });
  document.addEventListener("pointerdown", (event) => {
    const hit = event.target.closest && event.target.closest(".hit");
    show(hit, event.clientX, event.clientY);
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") show(null); });
  document.addEventListener("scroll", () => { if (!lit || !lit.closest(":focus")) show(null); }, { passive: true });

  for (const link of "DecompressionStream" in self ? document.querySelectorAll("a[data-packed]") : []) {
    link.download = link.download.replace(/\.gz$/, "");
    link.addEventListener("click", async (event) => {
      if (!link.hasAttribute("data-packed")) return;
      event.preventDefault();
      const bytes = Uint8Array.from(atob(link.href.split(",")[1]), (one) => one.charCodeAt(0));
      const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
      const text = await new Response(unpacked).blob();
      link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
      link.removeAttribute("data-packed");
      link.click();
    });
  }
})();
