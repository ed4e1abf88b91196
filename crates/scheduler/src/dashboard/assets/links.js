// The links between the GPUs of a node, as a graph and as a matrix.

import { h, svg } from "./dom.js";
import { t } from "./text.js";

const [SIZE, CENTRE, RADIUS] = [320, 160, 122];

const word = (link) => (!link ? "" : link.nvlinks > 0 ? `NV${link.nvlinks}` : (link.pcie ?? ""));
const kind = (link) => (!link ? "" : link.nvlinks > 0 ? "nv" : (link.pcie ?? "").toLowerCase());

/** Returns the position of a GPU on the circle, clockwise from the top. */
function position(number, count) {
  const angle = (2 * Math.PI * number) / count - Math.PI / 2;
  return [CENTRE + RADIUS * Math.cos(angle), CENTRE + RADIUS * Math.sin(angle)];
}

export function linkGraph({ gpus, links, nvswitchLinks }) {
  const places = gpus.map((_, number) => position(number, gpus.length));
  const line = (from, to, link, text) => svg("line", {
    class: `link ${kind(link)}`, x1: from[0], y1: from[1], x2: to[0], y2: to[1],
    "stroke-width": link.nvlinks > 0 ? 1 + Math.min(4, link.nvlinks / 2) : 1,
  }, svg("title", {}, text));
  // With NVSwitches all pairs are alike, so the graph shows one line from each GPU to the switch.
  const lines = nvswitchLinks !== undefined
    ? places.map((place) => line(place, [CENTRE, CENTRE], { nvlinks: nvswitchLinks }, `NV${nvswitchLinks}`))
    : links.map((link) => line(places[link.a], places[link.b], link, `${link.a} – ${link.b}: ${word(link)}`))
      .sort((a, b) => a.getAttribute("stroke-width") - b.getAttribute("stroke-width"));
  const hub = nvswitchLinks !== undefined && svg("g", { class: "switch" },
    svg("rect", { x: CENTRE - 42, y: CENTRE - 15, width: 84, height: 30, rx: 6 }),
    svg("text", { x: CENTRE, y: CENTRE + 4 }, t("node.switch")));
  const vertices = gpus.map((gpu, number) => svg("g", { class: `vertex ${gpu.faulty ? "unhealthy" : gpu.healthy ? "" : "withheld"}` },
    svg("circle", { cx: places[number][0], cy: places[number][1], r: 17 }),
    svg("text", { x: places[number][0], y: places[number][1] + 5 }, gpu.index)));
  return svg("svg", { class: "graph", viewBox: `0 0 ${SIZE} ${SIZE}`, role: "img", "aria-label": t("node.graph.label", { n: gpus.length }) },
    lines, hub, vertices);
}

export function linkMatrix({ gpus, links, identities }) {
  const between = new Map(links.flatMap((link) => [[`${link.a} ${link.b}`, link], [`${link.b} ${link.a}`, link]]));
  const cell = (a, b) => {
    const link = between.get(`${a} ${b}`);
    return a === b ? h("td", { class: "self" }, "·") : h("td", { class: kind(link) }, word(link) || "?");
  };
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": t("node.matrix") },
    h("table", { class: "matrix" },
      h("thead", {}, h("tr", {}, h("td", {}), gpus.map((gpu) => h("th", { scope: "col" }, gpu.index)), h("th", { scope: "col" }, t("numa")))),
      h("tbody", {}, gpus.map((row) => h("tr", {},
        h("th", { scope: "row" }, t("gpu.n", { n: row.index })),
        gpus.map((column) => cell(row.index, column.index)),
        h("td", { class: "muted" }, identities[row.index]?.numa ?? "–"))))));
}
