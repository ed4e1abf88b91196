// The page that shows where a hypothetical pod would fit.

import { get, post } from "./api.js";
import { h } from "./dom.js";
import { explanation } from "./explanation.js";
import { t } from "./text.js";

const POLICIES = ["tessera", "link", "fragment", "share", "simple", "static", "best-effort", "binpack", "spread"];

// The kinds of requests: the text key, and the fields with their text key, resource name and
// default value.
const KINDS = {
  whole: ["whatif.whole", [["whatif.gpus", "nvidia.com/gpu", 1]]],
  topology: ["whatif.topology", [["whatif.gpus", "aliyun.com/gpu", 2]]],
  share: ["whatif.share", [["whatif.percent", "tencent.com/vcuda-core", 50], ["whatif.blocks", "tencent.com/vcuda-memory", 32]]],
  memory: ["whatif.memory", [["whatif.units", "aliyun.com/gpu-mem", 8]]],
  manifest: ["whatif.manifest", []],
};

const EXAMPLE = {
  metadata: { name: "supposed", namespace: "default" },
  spec: { containers: [{ name: "main", resources: { limits: { "nvidia.com/gpu": "1" } } }] },
};

export default function whatIf({ parameters, signal }) {
  const field = (label, input) => h("label", {}, h("span", {}, label), input);
  const result = h("section", { class: "card", role: "status", hidden: true });
  const submit = h("button", { type: "submit" }, t("whatif.ask"));
  const kind = h("select", { name: "kind", onchange: showFields }, Object.entries(KINDS).map(([value, [text]]) => h("option", { value }, t(text))));
  const namespace = h("input", { name: "namespace", value: parameters.namespace ?? "default", list: "namespaces" });
  const names = h("datalist", { id: "namespaces" });
  const cpu = h("input", { name: "cpu", value: "4", inputmode: "decimal" });
  const policy = h("select", { name: "policy" }, h("option", { value: "" }, t("whatif.cluster")), POLICIES.map((name) => h("option", { value: name }, name)));
  const manifest = h("textarea", { name: "manifest", rows: 12, spellcheck: "false" });
  manifest.value = JSON.stringify(EXAMPLE, null, 2);
  const amounts = h("div", { class: "amounts" });
  const common = h("div", { class: "amounts" }, field(t("namespace"), namespace), field(t("whatif.cpu"), cpu), field(t("whatif.policy"), policy));

  function showFields() {
    const byHand = kind.value === "manifest";
    common.hidden = byHand;
    amounts.replaceChildren(...(byHand ? [field(t("whatif.manifest"), manifest)]
      : KINDS[kind.value][1].map(([label, resource, value]) => field(t(label), h("input", { type: "number", min: "0", name: resource, value })))));
  }

  function pod() {
    if (kind.value === "manifest") return manifest.value;
    const limits = Object.fromEntries([...amounts.querySelectorAll("input")].map((input) => [input.name, input.value]));
    if (cpu.value) limits.cpu = cpu.value;
    const annotations = policy.value ? { "tessera.dev/policy": policy.value } : {};
    return JSON.stringify({
      metadata: { name: "supposed", namespace: namespace.value, annotations },
      spec: { containers: [{ resources: { limits } }] },
    });
  }

  async function submitted(event) {
    event.preventDefault();
    submit.textContent = t("whatif.asking");
    result.hidden = false;
    try {
      result.replaceChildren(explanation(await post("what-if", pod(), signal)));
    } catch (error) {
      if (error.name !== "AbortError") result.replaceChildren(h("p", { class: "bad" }, error.message));
    }
    submit.textContent = t("whatif.ask");
  }

  return {
    async mount(root) {
      const { namespaces } = await get("cluster", signal);
      names.append(...namespaces.map((view) => h("option", { value: view.namespace })));
      showFields();
      root.append(
        h("div", { class: "page-head" }, h("h1", {}, t("what-if"))),
        h("p", { class: "muted" }, t("whatif.note")),
        h("form", { class: "card what-if", onsubmit: submitted }, field(t("whatif.kind"), kind), amounts, common, names, h("p", {}, submit)),
        result);
    },
    told() {},
  };
}
