// Shows why a pod waits, or where a hypothetical pod would fit.

import { h } from "./dom.js";
import { count, decimal, link } from "./format.js";
import { bar } from "./tile.js";
import { reason, t } from "./text.js";

const nodeLink = (name) => h("a", { href: link("node", name) }, name);

function best(views) {
  return h("section", {},
    h("h3", {}, t("explain.best")),
    h("ul", { class: "plain places" }, views.map((view) => h("li", { "data-key": view.node },
      nodeLink(view.node), " ", h("span", { class: "muted" }, t("explain.wouldget")), " ",
      view.gpus.map((container) => h("span", { class: "chip" }, `${container.container && `${container.container}: `}${t("gpu.n", { n: container.gpus.join(", ") })}`)),
      " ", h("span", { class: "muted figure" }, t("explain.score"), " ", decimal(view.score, 4))))));
}

function gpuReasons(view) {
  return h("li", { "data-key": view.node }, nodeLink(view.node), view.container && h("span", { class: "muted" }, ` (${t("container")} ${view.container})`),
    view.gpuReasons && h("ul", { class: "plain gpu-reasons" }, view.gpuReasons.map((gpu) => h("li", {},
      h("span", { class: "figure" }, t("gpu.n", { n: gpu.gpu })), " ",
      gpu.reason === null ? h("span", { class: "good" }, t("explain.free")) : h("span", { title: gpu.reason }, reason(gpu.reason))))));
}

function refusals(groups, all, title) {
  return h("section", {},
    h("h3", {}, title),
    h("ul", { class: "plain refusals" }, groups.map((group) => h("li", { "data-key": group.reason },
      h("p", {},
        h("strong", { class: "figure" }, t("nodes.count", { n: count(group.nodes) })), " ",
        h("span", { title: group.reason }, reason(group.reason))),
      bar([["plain-part", group.nodes]], all),
      h("p", { class: "muted" }, t("explain.evictions"), " ", t(group.mayResolve ? "explain.resolve" : "explain.noresolve")),
      group.examples.some((view) => view.gpuReasons) && h("details", {},
        h("summary", {}, t("explain.examples", { n: count(group.examples.length) })),
        h("ul", { class: "plain" }, group.examples.map(gpuReasons)))))));
}

export function explanation(found) {
  if (found.problem) return h("p", { class: "bad" }, t("pod.problem"), ": ", found.problem);
  return h("div", { class: "explanation" },
    h("p", { class: "lead" },
      found.fitting > 0 ? t("explain.fits", { n: count(found.fitting), all: count(found.nodes) }) : t("explain.nowhere", { all: count(found.nodes) }),
      " ", h("span", { class: "muted" }, t("explain.policy", { policy: found.policy }))),
    found.best.length > 0 && best(found.best),
    found.refusals.length > 0 && refusals(found.refusals, found.nodes, t(found.fitting > 0 ? "explain.refusals" : "explain.obstacles")));
}
