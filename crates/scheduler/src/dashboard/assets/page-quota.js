// The page of quotas and usage by namespace.

import { get } from "./api.js";
import { h } from "./dom.js";
import { colour, count, decimal, link, memory } from "./format.js";
import { bar } from "./tile.js";
import { t } from "./text.js";

function meter(name, held, most, words, isReadable) {
  const over = most !== undefined && held >= most;
  return h("li", { "data-key": name },
    h("p", { class: "meter" }, h("span", {}, name),
      h("span", { class: `figure ${over ? "warn" : ""}` }, most === undefined ? `${words(held)}${isReadable ? ` · ${t("quota.unlimited")}` : ""}` : t("of", { part: words(held), whole: words(most) }))),
    most !== undefined && bar([[over ? "lost" : "accent", held]], most));
}

// The guaranteed amounts, and what is used beyond them. An amount that is absent is not guaranteed.
function guarantee({ compute, memoryMiB, borrowed }, gpus) {
  const amounts = (of) => [
    compute !== undefined && gpus(of.compute),
    memoryMiB !== undefined && memory(of.memoryMiB),
  ].filter(Boolean).join(", ");
  return h("p", { class: "muted" },
    t("quota.guaranteed", { amounts: amounts({ compute, memoryMiB }), borrowed: amounts(borrowed) }));
}

function namespaceCard(view) {
  const limit = view.limit ?? {};
  const models = Object.entries(limit.gpus ?? {});
  const gpus = (value) => t("gpus.count", { n: decimal(value / 100) });
  return h("section", { class: "card", "data-key": view.namespace },
    h("h2", {}, h("span", { class: `dot ${colour(view.namespace)}` }), h("a", { href: link("pods", { namespace: view.namespace }) }, view.namespace)),
    view.problem && h("p", { class: "bad" }, view.problem),
    h("ul", { class: "plain meters" },
      models.map(([name, most]) => meter(t("quota.model", { model: name }), view.byModel[name]?.compute ?? 0, 100 * most, gpus, true)),
      meter(t("compute"), view.held.compute, limit.compute, gpus, !view.problem),
      meter(t("memory"), view.held.memoryMiB, limit.memoryMiB, memory, !view.problem)),
    view.guaranteed && guarantee(view.guaranteed, gpus),
    limit.pools?.length > 0 && h("p", { class: "muted" }, t("quota.pools", { pools: limit.pools.join(", ") })));
}

export default function quota({ signal }) {
  return {
    load: () => get("quota", signal),
    draw: (namespaces) => [
      h("div", { class: "page-head" }, h("h1", {}, t("quota")), h("p", { class: "muted" }, t("quota.count", { n: count(namespaces.length) }))),
      h("p", { class: "muted" }, t("quota.note")),
      namespaces.length === 0 ? h("p", { class: "card" }, t("quota.none")) : h("div", { class: "grid" }, namespaces.map(namespaceCard)),
    ],
    cares: () => true,
  };
}
