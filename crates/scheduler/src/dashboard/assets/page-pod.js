// The page of one pod: its requests, its grant and usage, or the reason why it waits.

import { get, path, query } from "./api.js";
import { h } from "./dom.js";
import { age, ask, link, memory, model, points } from "./format.js";
import { explanation } from "./explanation.js";
import { decisionList } from "./page-decisions.js";
import { bar } from "./tile.js";
import { reason, t } from "./text.js";

const EVERY = 3000;

function asks(pod) {
  if (pod.problem) return h("p", { class: "bad" }, t("pod.problem"), ": ", pod.problem);
  const claims = [...new Set(pod.grants.map((grant) => grant.claim).filter(Boolean))];
  if (claims.length) return h("ul", { class: "plain" }, claims.map((name) => h("li", {}, h("span", { class: "chip" }, t("holder.claim", { name })))));
  return h("ul", { class: "plain" }, pod.asks.map((one) => h("li", {}, h("strong", {}, one.container), " ", h("span", { class: "chip" }, ask(one)),
    " ", h("span", { class: "muted" }, one.dialect))),
    [...(pod.others ?? []), ...(pod.unserved ?? [])].map((one) => h("li", {}, h("span", { class: "chip" }, one))));
}

/** Shows the measured usage of a container on a GPU. */
function measured(used, grant) {
  // A claim does not say which container of the pod uses the GPU.
  const isUser = (one) => grant.claim ? one.gpus.some((gpu) => gpu.uuid === grant.uuid) : one.container === grant.container;
  const container = used?.use?.containers.find(isUser);
  const share = container?.gpus.find((one) => one.uuid === grant.uuid);
  const known = [share?.memoryUsedMiB !== undefined && memory(share.memoryUsedMiB), share?.busyPercent !== undefined && t("used.busy", { n: points(share.busyPercent) }),
    share?.throttledPercent !== undefined && t("used.throttled", { n: points(share.throttledPercent) })].filter(Boolean);
  if (!known.length) return h("p", { class: "muted" }, t("used"), ": ", t("used.none"));
  return [h("p", { class: "muted" }, t("used"), ": ", known.join(" · ")),
    share.memoryUsedMiB !== undefined && bar([["accent", share.memoryUsedMiB]], grant.memoryMiB)];
}

function grants(pod, used) {
  if (pod.grants.length === 0 && pod.others) return h("p", {}, pod.others.join(", "));
  if (pod.grants.length === 0) return h("p", { class: "muted" }, t(pod.state === "placed" ? "pod.unknown-gpus" : "pod.nogrant"));
  return h("div", { class: "gpus" }, pod.grants.map((grant) => h("section", { class: "card gpu", "data-key": `${grant.claim ?? ""} ${grant.container} ${grant.uuid}` },
    h("h3", {}, h("a", { href: link("node", pod.node, { gpu: grant.index }) }, t("gpu.n", { n: grant.index })), h("span", { class: "chip" }, grant.whole ? t("whole") : t("shared"))),
    h("p", { class: "muted" }, `${model(grant.model)} · ${grant.claim ? t("holder.claim", { name: grant.claim }) : `${t("container")} ${grant.container}`}`),
    h("p", { class: "meter" }, h("span", {}, t("memory")), h("span", { class: "figure" }, memory(grant.memoryMiB))),
    h("p", { class: "meter" }, h("span", {}, t("compute")), h("span", { class: "figure" }, grant.compute ? points(grant.compute) : t("pod.guaranteed"))),
    measured(used, grant),
    h("p", { class: "muted small" }, grant.uuid))));
}

export default function pod({ parts: [namespace = "", name = ""], signal, redraw }) {
  let used;
  let asked = 0;
  return {
    async load() {
      const here = path("pods", namespace, name);
      const found = await get(here, signal);
      if (found.node && Date.now() - asked > EVERY) {
        asked = Date.now();
        get(`${here}/use`, signal).then((answer) => {
          used = answer;
          redraw();
        }, () => (used = undefined));
      }
      const [why, decisions] = await Promise.all([
        found.state !== "booking" && !found.problem ? get(`${here}/explanation`, signal) : undefined,
        get(query("decisions", { uid: found.uid, limit: 20 }), signal),
      ]);
      return { found, why, decisions };
    },
    every: EVERY,
    draw({ found, why, decisions }) {
      const annotations = Object.entries(found.annotations);
      return [
        h("div", { class: "page-head" }, h("h1", {}, h("span", { class: "muted" }, `${found.namespace}/`), found.name),
          h("p", {}, h("span", { class: `chip ${found.state}` }, t(`state.${found.state}`)), " ", found.node && h("a", { href: link("node", found.node) }, found.node),
            found.created && h("span", { class: "muted" }, ` ${t(found.state === "waiting" ? "pod.waits-for" : "pod.age", { age: age(found.created) })}`),
            found.priority !== 0 && h("span", { class: "muted" }, ` ${t("priority")} ${found.priority}`))),
        h("section", { class: "card" }, h("h2", {}, t("asks")), asks(found)),
        why && h("section", { class: "card", "data-key": "why" }, h("h2", {}, t(found.state === "placed" ? "pod.where" : "pod.why")), explanation(why)),
        found.state !== "waiting" && h("section", { "data-key": "grant" }, h("h2", {}, t("pod.grant")),
          used?.notMeasured && h("p", { class: "muted" }, t("used.why", { why: reason(used.notMeasured) })), grants(found, used)),
        h("section", { class: "card" }, h("h2", {}, t("pod.decisions")), decisionList(decisions, true)),
        annotations.length > 0 && h("section", { class: "card" }, h("h2", {}, t("pod.annotations")),
          h("dl", { class: "annotations" }, annotations.map(([key, value]) => h("div", {}, h("dt", {}, key), h("dd", {}, value))))),
      ];
    },
    // Any change in the cluster may make room for the pod.
    cares: () => true,
    // An explanation checks every node, so it is loaded less often.
    pace: () => 1500,
  };
}
