// The list of all nodes, as cards with one tile per GPU.

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
  // Waiting pods are on no node, so a search also links to the list of pods.
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
    counted: (n) => (total.textContent = n === 0 ? t("nodes.none") : t("nodes.count", { n: count(n) })),
    failed: (error) => (total.textContent = `${t("failed")}: ${error.message}`),
  });
  return {
    async mount(root) {
      const changed = (kept) => {
        filter = kept;
        offerPods();
        list.reset();
      };
      const form = await filterForm("nodes", parameters, { states: [["trouble", t("filter.state.trouble")]], fullness: true,
        sorts: [["", t("sort.name")], ["full", t("sort.full")], ["free", t("sort.free")], ["trouble", t("sort.trouble")]], changed, signal });
      root.append(h("div", { class: "page-head" }, h("h1", {}, t("nodes")), total, also), form, h("p", { class: "muted legend" }, t("legend")), list.element);
      offerPods();
      await list.reset();
    },
    shown: () => list.paint(),
    told(news) {
      // With a filter, any change may add a node to the list. Without a filter, only loaded nodes
      // matter.
      const filtered = Object.keys(filter).length > 0;
      if (news.all || filtered || list.has((node) => news.nodes.includes(node.name))) list.refresh();
    },
  };
}
