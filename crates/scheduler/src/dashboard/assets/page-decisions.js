// The page of recent decisions and their reasons.

import { get, query } from "./api.js";
import { h } from "./dom.js";
import { count, link, time } from "./format.js";
import { filterForm } from "./filters.js";
import { placementReason, t } from "./text.js";

const OUTCOMES = ["bound", "not-bound", "fits", "fits-nowhere", "victims", "no-victims"];
const GOOD = new Set(["bound", "fits"]);
const BAD = new Set(["not-bound", "fits-nowhere"]);
const tone = (outcome) => (GOOD.has(outcome) ? "good" : BAD.has(outcome) ? "bad" : "warn");

function words(decision) {
  switch (decision.outcome) {
    case "fits": return t("decision.fits", { nodes: t("nodes.count", { n: count(decision.nodes) }) });
    case "bound": return t(decision.gpus.length ? "decision.bound" : "decision.bound.plain", { node: decision.node, gpus: decision.gpus.join(", ") });
    case "not-bound": return t("decision.not-bound", decision);
    case "victims": return Object.entries(decision.victims).map(([node, pods]) => t("decision.victims", { node, pods: pods.join(", ") })).join("; ");
    default: return t(`decision.${decision.outcome}`);
  }
}

/** Shows the number of rejected nodes by kind of reason. */
export function refused(answer) {
  const kinds = Object.entries(answer.refused ?? {}).sort((a, b) => b[1] - a[1]);
  return kinds.flatMap(([kind, nodes]) => [h("span", { class: "chip" }, t("decision.refused", { n: count(nodes), kind: t(`kind.${kind}`) })), " "]);
}

/** Lists decisions, newest first. `reasons` adds the reason of each choice, for the page of one
 *  pod. */
export function decisionList(decisions, reasons = false) {
  if (decisions.length === 0) return h("p", { class: "muted" }, t("decisions.none"));
  return h("ol", { class: "plain decisions" }, decisions.map((decision) => h("li", { "data-key": String(decision.sequence) },
    h("time", { class: "muted figure", datetime: new Date(decision.unixMillis).toISOString() }, time(decision.unixMillis)),
    h("span", { class: `chip ${tone(decision.outcome)}` }, t(`outcome.${decision.outcome}`)),
    h("span", { class: "what" },
      h("a", { href: link("pod", decision.namespace, decision.pod) }, `${decision.namespace}/${decision.pod}`), " ",
      h("span", {}, words(decision)), " ", reasons && decision.why && h("span", { class: "muted" }, `· ${placementReason(decision.why)}`), refused(decision),
      decision.times > 1 && h("span", { class: "muted" }, ` ${t("decisions.times", { n: count(decision.times) })}`)))));
}

export default function decisions({ parameters, signal, redraw }) {
  let filter = parameters;
  let form;
  let found = [];
  async function read() {
    const wanted = filter;
    const answer = await get(query("decisions", wanted), signal);
    // The filter may have changed while the answer was on its way.
    if (wanted === filter) found = answer;
  }
  async function changed(kept) {
    filter = kept;
    await read().catch(() => {});
    redraw();
  }
  return {
    async load() {
      const outcomes = OUTCOMES.map((name) => [name, t(`outcome.${name}`)]);
      form ??= await filterForm("decisions", parameters, { searched: "pod", outcomes, changed, signal });
      await read();
      return true;
    },
    draw: () => [
      h("div", { class: "page-head" }, h("h1", {}, t("decisions"))),
      h("p", { class: "muted" }, t("decisions.note", { n: 500 })),
      form.isConnected ? h("form", { "data-keep": true }) : form,
      h("section", { class: "card" }, found.length === 0 && Object.keys(filter).length > 0 ? h("p", { class: "muted" }, t("decisions.none.match")) : decisionList(found)),
    ],
    cares: () => true,
  };
}
