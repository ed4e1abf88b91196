// All nodes, as GPUs of tiles.

import { get, query } from "./api.js";
import { h } from "./dom.js";
import { count, link } from "./format.js";
import { filterForm } from "./filters.js";
import { nodeCard } from "./tile.js";
import { t } from "./text.js";
import { virtualList } from "./virtual.js";

export default function nodes({ parameters, signal }) {
  let filter = parameters;
  const total = h("p", { class: "muted", role: "status" });
  // Pods that wait are on no node.
  const also = h("a", { class: "button quiet" });
  const offerPods = () => {
    also.hidden = !filter.q;
    also.href = link("pods", { q: filter.q });
    also.textContent = t("nodes.also", { q: filter.q ?? "" });
  };
  const list = virtualList({
    signal,
    least: 300,
    height: 194,
    load: (offset, limit) => get(query("nodes", { ...filter, offset, limit }), signal),
    draw: nodeCard,
    counted: (n) => (total.textContent = n === 0 ? t("nodes.none") : t(n === 1 ? "nodes.one" : "nodes.count", { n: count(n) })),
    failed: (error) => (total.textContent = `${t("failed")}: ${error.message}`),
  });
  return {
    async mount(root) {
      const changed = (kept) => {
        filter = kept;
        offerPods();
        list.reset();
      };
      const form = await filterForm("nodes", parameters, { states: [["trouble", t("filter.state.trouble")]], fullness: true, changed, signal });
      root.append(h("div", { class: "page-head" }, h("h1", {}, t("nodes")), total, also), form, h("p", { class: "muted legend" }, t("legend")), list.element);
      offerPods();
      await list.reset();
    },
    shown: () => list.paint(),
    told(news) {
      // A filter may let a node through now that it did not before; without one only nodes that are seen matter.
      const filtered = Object.keys(filter).length > 0;
      if (news.all || filtered || list.has((node) => news.nodes.includes(node.name))) list.refresh();
    },
  };
}
