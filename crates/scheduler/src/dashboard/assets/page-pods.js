// The list of GPU pods, waiting pods first.

import { get, query } from "./api.js";
import { h } from "./dom.js";
import { age, ask, colour, count, link } from "./format.js";
import { filterForm } from "./filters.js";
import { refused } from "./page-decisions.js";
import { t } from "./text.js";
import { virtualList } from "./virtual.js";

/** The reason why a pod waits: kube-scheduler's own words come first. */
export function why(pod) {
  const report = pod.kubeScheduler && (pod.kubeScheduler.message || pod.kubeScheduler.reason);
  if (report) return h("span", { title: report }, report);
  const kinds = refused(pod);
  return kinds.length > 0 || !pod.unreported ? kinds : t("explain.unreported", { scheduler: pod.unreported });
}

function row(pod) {
  const asks = [...pod.asks.map(ask), ...(pod.others ?? [])].map((one) => h("span", { class: "chip" }, one));
  return h("article", { class: "card pod-row", "data-key": pod.uid },
    h("span", { class: "name" }, h("span", { class: `dot ${colour(pod.namespace)}` }), h("a", { href: link("pod", pod.namespace, pod.name) }, `${pod.namespace}/${pod.name}`)),
    h("span", { class: "where" }, h("span", { class: `chip ${pod.state}` }, t(`state.${pod.state}`)), " ",
      pod.created && h("span", { class: "muted figure age" }, age(pod.created), " "), pod.node && h("a", { href: link("node", pod.node) }, pod.node)),
    h("span", { class: "asks" }, pod.problem ? h("span", { class: "bad", title: pod.problem }, pod.problem) : [asks, " ", pod.unserved?.length > 0 && h("span", { class: "chip warn" }, t("pods.unserved", { resources: pod.unserved.join(", ") })),
      h("span", { class: "muted" }, why(pod))]));
}

export default function pods({ parameters, signal }) {
  let filter = parameters;
  let seen;
  const total = h("p", { class: "muted", role: "status" });
  const none = () => t(filter.state === "waiting" ? "pods.none.waiting" : "pods.none");
  const list = virtualList({
    signal,
    least: 10000,
    height: matchMedia("(max-width: 720px)").matches ? 104 : 54,
    load: (offset, limit) => get(query("pods", { ...filter, offset, limit }), signal),
    draw: row,
    counted: (n) => (total.textContent = n === 0 ? none() : t("pods.count", { n: count(n) })),
    failed: (error) => (total.textContent = `${t("failed")}: ${error.message}`),
  });
  return {
    async mount(root) {
      const changed = (kept) => {
        filter = kept;
        list.reset();
      };
      const form = await filterForm("pods", parameters, { states: [["waiting", t("state.waiting")], ["placed", t("state.placed")]],
        sorts: [["", t("sort.waiting")], ["age", t("sort.age")], ["youngest", t("sort.youngest")], ["name", t("sort.name")]], changed, signal });
      root.append(h("div", { class: "page-head" }, h("h1", {}, t("pods")), total), form, list.element);
      await list.reset();
    },
    shown: () => list.paint(),
    told(news) {
      const decided = news.decisions !== seen;
      seen = news.decisions;
      if (news.all || news.waiting || decided || news.nodes.length > 0) list.refresh();
    },
  };
}
