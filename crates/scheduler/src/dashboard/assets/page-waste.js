// The page of pods that hold more than they use.

import { get } from "./api.js";
import { h } from "./dom.js";
import { age, colour, count, decimal, link, memory, percent } from "./format.js";
import { sparkline } from "./spark.js";
import { bar } from "./tile.js";
import { t } from "./text.js";

// The columns: the key of the address, the text key, and the value by which rows are sorted.
const COLUMNS = [
  ["pod", "pod", (pod) => `${pod.namespace}/${pod.name}`],
  ["node", "node", (pod) => pod.node],
  ["held", "waste.held", (pod) => -pod.heldGpus],
  ["used", "waste.used", (pod) => pod.usedGpus / Math.max(0.01, pod.heldGpus)],
  ["wasted", "waste.wasted", (pod) => -pod.wastedGpus],
  ["idle", "waste.idle", (pod) => pod.idleSinceMillis ?? Infinity],
];

const before = (a, b) => (typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b);

/** Lists pods with what they hold and use. `sort` links the column names to this order. A table without it is small
 *  and leaves out the nodes. */
export function wasteTable(pods, sort) {
  const columns = sort ? COLUMNS : COLUMNS.filter(([key]) => key !== "node" && key !== "wasted");
  const heading = ([key, text]) => h("th", { scope: "col", class: ["held", "used", "wasted", "idle"].includes(key) ? "number" : "", "aria-sort": sort?.current === key ? "ascending" : undefined },
    sort ? h("a", { href: sort.link(key) }, t(text)) : t(text));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": t("waste") },
    h("table", { class: "waste" },
      h("thead", {}, h("tr", {}, columns.map(heading))),
      h("tbody", {}, pods.map((pod) => h("tr", { "data-key": `${pod.namespace}/${pod.name}` },
        h("th", { scope: "row" }, h("span", { class: `dot ${colour(pod.namespace)}` }), h("a", { href: link("pod", pod.namespace, pod.name) }, `${pod.namespace}/${pod.name}`)),
        sort && h("td", {}, h("a", { href: link("node", pod.node) }, pod.node)),
        h("td", { class: "number" }, `${decimal(pod.heldGpus)} ${t("unit.gpus")}`),
        h("td", { class: "with-bar number" }, bar([["accent", pod.usedGpus]], pod.heldGpus), h("span", { class: "figure" }, percent(pod.usedGpus, pod.heldGpus)),
          sort && pod.memoryUsedMiB !== undefined && h("span", { class: "muted" }, ` · ${memory(pod.memoryUsedMiB)}`)),
        sort && h("td", { class: `number ${pod.idle ? "warn" : ""}` }, decimal(pod.wastedGpus, 2)),
        h("td", { class: `number ${pod.idle ? "warn" : ""}` }, pod.idleSinceMillis === undefined ? "–" : age(pod.idleSinceMillis)))))));
}

export default function waste({ parameters, signal }) {
  const current = COLUMNS.some(([key]) => key === parameters.sort) ? parameters.sort : "wasted";
  const [, , value] = COLUMNS.find(([key]) => key === current);
  const passes = (pod) => (!parameters.namespace || pod.namespace === parameters.namespace) && (parameters.state !== "idle" || pod.idle);
  const chip = (text, changes, on) => h("a", { class: `chip ${on ? "accent" : ""}`, href: link("waste", { ...parameters, ...changes }), "aria-current": on ? "true" : undefined }, text);
  return {
    load: () => get("waste", signal),
    draw(view) {
      const pods = view.pods.filter(passes).toSorted((a, b) => before(value(a), value(b)));
      const namespaces = [...new Set(view.pods.map((pod) => pod.namespace))].sort();
      return [
        h("div", { class: "page-head" }, h("h1", {}, t("waste")), h("p", { class: "muted", role: "status" }, t("pods.count", { n: count(pods.length) }))),
        h("p", { class: "muted" }, t("waste.note")),
        h("section", { class: "card" }, sparkline(view.history, Math.max(view.heldGpus, ...view.history.map((point) => point.held)))),
        h("p", { class: "chips" }, chip(t("filter.all"), { state: "", namespace: "" }, !parameters.state && !parameters.namespace), " ", chip(t("over.idle"), { state: "idle" }, parameters.state === "idle"),
          namespaces.map((name) => [" ", chip(name, { namespace: name }, parameters.namespace === name)])),
        h("section", { class: "card" }, pods.length === 0 ? h("p", { class: "muted" }, t("waste.none")) : wasteTable(pods, { current, link: (key) => link("waste", { ...parameters, sort: key }) })),
        view.unknownPods > 0 && h("p", { class: "muted" }, t("waste.unknown", { n: count(view.unknownPods) })),
      ];
    },
    every: 10000,
    cares: () => false,
  };
}
