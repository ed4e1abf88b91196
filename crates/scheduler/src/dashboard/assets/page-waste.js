// The page of pods that hold more than they use.

import { get, query } from "./api.js";
import { h } from "./dom.js";
import { age, colour, count, decimal, link, memory, percent, time } from "./format.js";
import { sparkline } from "./spark.js";
import { bar } from "./tile.js";
import { t } from "./text.js";

// The columns: the key of the address, by which the server sorts, the text key, and the direction of the order.
const [UP, DOWN] = ["ascending", "descending"];
const COLUMNS = [["pod", "pod", UP], ["node", "node", UP], ["held", "waste.held", DOWN], ["used", "waste.used", UP],
  ["wasted", "waste.wasted", DOWN], ["idle", "waste.idle", DOWN]];

// Pods on one page of the list.
const PAGE = 100;

/** The reason why the number of idle pods is unknown. */
export function unknownIdle({ usedGpus, observedSinceMillis }) {
  return usedGpus === undefined || observedSinceMillis === undefined ? t("over.used.unknown") : t("over.idle.unknown", { since: time(observedSinceMillis) });
}

/** The text for an empty list: no pod is idle, or no use is known. */
export function noWaste(view, state) {
  if (view.usedGpus === undefined) return t("over.used.unknown");
  return state === "idle" && view.idlePods === undefined ? unknownIdle(view) : t("waste.none");
}

/** Lists pods with what they hold and use. `sort` links the column names to this order, and the sorted column to the
 *  reversed order. A table without it is small and leaves out the nodes. */
export function wasteTable(pods, sort) {
  const columns = sort ? COLUMNS : COLUMNS.filter(([key]) => key !== "node" && key !== "wasted");
  const heading = ([key, text, usual]) => {
    const isSorted = sort?.current === key;
    const direction = isSorted && ((usual === UP) !== sort.reversed ? UP : DOWN);
    return h("th", { scope: "col", class: ["held", "wasted", "idle"].includes(key) ? "number" : "", "aria-sort": direction || undefined },
      sort ? h("a", { href: sort.link(key, isSorted && !sort.reversed) }, t(text)) : t(text),
      isSorted && h("span", { class: "sorted", "aria-hidden": "true" }, direction === UP ? " ▲" : " ▼"));
  };
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": t("waste") },
    h("table", { class: "waste" },
      h("thead", {}, h("tr", {}, columns.map(heading))),
      h("tbody", {}, pods.map((pod) => h("tr", { "data-key": `${pod.isClaim ? "claim " : ""}${pod.namespace}/${pod.name}` },
        h("th", { scope: "row" }, h("span", { class: `dot ${colour(pod.namespace)}` }), pod.isClaim ? t("holder.claim", { name: `${pod.namespace}/${pod.name}` }) : h("a", { href: link("pod", pod.namespace, pod.name) }, `${pod.namespace}/${pod.name}`)),
        sort && h("td", {}, h("a", { href: link("node", pod.node) }, pod.node)),
        h("td", { class: "number" }, t("gpus.count", { n: decimal(pod.heldGpus) })),
        h("td", { class: "with-bar" }, bar([["accent", pod.usedGpus]], pod.heldGpus), h("span", { class: "figure" }, percent(pod.usedGpus, pod.heldGpus)),
          sort && h("span", { class: "muted amount" }, pod.memoryUsedMiB !== undefined && `· ${memory(pod.memoryUsedMiB)}`)),
        sort && h("td", { class: `number ${pod.idle ? "warn" : ""}` }, decimal(pod.wastedGpus, 2)),
        h("td", { class: `number ${pod.idle ? "warn" : ""}` }, pod.idleSinceMillis === undefined ? "–" : age(pod.idleSinceMillis)))))));
}

/** Links to the parts of a list that is longer than one page. */
function pages({ total, offset, pods }, parameters) {
  if (total <= PAGE) return false;
  const part = (text, to, rel) => h("a", { class: "chip", href: link("waste", { ...parameters, offset: to || "" }), rel }, text);
  return h("nav", { class: "chips", "aria-label": t("waste.pages") },
    h("span", { class: "muted" }, t("waste.range", { from: count(offset + 1), to: count(offset + pods.length), total: count(total) })), " ",
    offset > 0 && part(t("waste.previous"), Math.max(0, offset - PAGE), "prev"), " ",
    offset + pods.length < total && part(t("waste.next"), offset + PAGE, "next"));
}

export default function waste({ parameters, signal }) {
  const current = COLUMNS.some(([key]) => key === parameters.sort) ? parameters.sort : "wasted";
  const { namespace, state, offset } = parameters;
  const reversed = parameters.reversed === "true";
  // Another order or selection begins with its first page.
  const chosen = (changes) => link("waste", { ...parameters, offset: "", ...changes });
  const chip = (text, changes, on) => h("a", { class: `chip ${on ? "accent" : ""}`, href: chosen(changes), "aria-current": on ? "true" : undefined }, text);
  return {
    load: () => get(query("waste", { namespace, state, offset, sort: current, reversed: reversed ? "true" : "", limit: PAGE }), signal),
    draw(view) {
      return [
        h("div", { class: "page-head" }, h("h1", {}, t("waste")), h("p", { class: "muted", role: "status" }, t("pods.count", { n: count(view.total) }))),
        h("p", { class: "muted" }, t("waste.note")),
        h("section", { class: "card" }, sparkline(view.history, Math.max(view.heldGpus, ...view.history.map((point) => point.held)))),
        h("p", { class: "chips" }, chip(t("filter.all"), { state: "", namespace: "" }, !state && !namespace), " ", chip(t("over.idle"), { state: "idle" }, state === "idle"),
          view.namespaces.map((name) => [" ", chip(name, { namespace: name }, namespace === name)])),
        h("section", { class: "card" }, view.pods.length === 0 ? h("p", { class: "muted" }, noWaste(view, state)) : wasteTable(view.pods, { current, reversed, link: (key, back) => chosen({ sort: key, reversed: back ? "true" : "" }) }),
          pages(view, parameters)),
        view.unknownPods > 0 && h("p", { class: "muted" }, t("waste.unknown", { n: count(view.unknownPods) })),
      ];
    },
    every: 10000,
    cares: () => false,
  };
}
