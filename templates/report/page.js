"use strict";
(() => {
  const config = JSON.parse(document.getElementById("config").textContent);

  // The chart library lies in the page, compressed; it is unpacked when a chart comes into view.
  let library;
  const unpack = async () => {
    const packed = document.getElementById("library").textContent;
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  };

  const draw = async (chart) => {
    if (chart.dataset.state) return;
    chart.dataset.state = "drawing";
    const spec = JSON.parse(chart.closest("figure").querySelector("script").textContent);
    try {
      library ??= unpack();
      await library;
      await window.vegaEmbed(chart, spec, { config, renderer: "svg", actions: false });
      chart.dataset.state = "drawn";
    } catch (error) {
      chart.dataset.state = "failed";
      chart.textContent = `This browser cannot draw the chart (${error.message}); its table can be read.`;
    }
  };

  const charts = [...document.querySelectorAll(".chart")];
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) {
        seen.unobserve(entry.target);
        draw(entry.target);
      }
    }
  }, { rootMargin: "600px" });
  charts.forEach((chart) => seen.observe(chart));
  window.addEventListener("beforeprint", () => charts.forEach(draw));

  const compare = (one, other) => {
    const [a, b] = [one.dataset.number, other.dataset.number];
    if (a !== undefined && b !== undefined) return a - b;
    if (a !== undefined || b !== undefined) return a !== undefined ? -1 : 1;
    return one.textContent.localeCompare(other.textContent, "en", { numeric: true });
  };
  const sort = (heading) => {
    const place = heading.cellIndex;
    const order = heading.ariaSort === "ascending" ? "descending" : "ascending";
    const sign = order === "ascending" ? 1 : -1;
    const body = heading.closest("table").tBodies[0];
    const rows = [...body.rows];
    rows.sort((one, other) => sign * compare(one.cells[place], other.cells[place]));
    body.append(...rows);
    for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", order);
  };
  for (const table of document.querySelectorAll("main table")) {
    const first = table.tBodies[0].rows[0];
    for (const heading of table.tHead.rows[0].cells) {
      if (first?.cells[heading.cellIndex].matches(".number")) heading.classList.add("number");
      heading.querySelector("button")?.addEventListener("click", () => sort(heading));
    }
  }

  // A link to a closed listing opens it; on a small screen the contents begin closed.
  const reveal = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target?.matches("details")) target.open = true;
  };
  window.addEventListener("hashchange", reveal);
  reveal();
  const contents = document.querySelector("nav details");
  if (matchMedia("(max-width: 68rem)").matches) contents.open = false;
  const links = [...document.querySelectorAll("nav a")];
  const current = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const link = links.find((item) => item.hash === `#${entry.target.id || "overview"}`);
      if (entry.isIntersecting) {
        links.forEach((item) => item.removeAttribute("aria-current"));
        link?.setAttribute("aria-current", "true");
      }
    }
  }, { rootMargin: "-20% 0px -75% 0px" });
  document.querySelectorAll("main > section").forEach((section) => current.observe(section));
  current.observe(document.querySelector("header"));
})();
