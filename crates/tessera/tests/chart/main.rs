//! The Helm chart: it is valid, the kustomize files equal its rendering, and its schema rejects mistakes. Needs helm,
//! which `e2e/kubernetes/build` builds, and kubectl: `cargo test -p tessera --test chart`.

#![allow(clippy::unwrap_used, reason = "test helpers may panic like tests")]

mod registry;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use serde_json::{Value, json};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Runs helm, as the end-to-end tests build it.
fn helm(arguments: &[&str]) -> Output {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| {
        let built = Command::new(root().join("e2e/kubernetes/build")).output().unwrap();
        Path::new(text(&built).trim()).join("kubernetes")
    });
    Command::new(program).arg("helm").args(arguments).current_dir(root()).output().unwrap()
}

fn template(version: &str, namespace: &str, values: &[&str]) -> Output {
    template_of("deploy/chart", version, namespace, values)
}

/// Renders a chart, which is a folder or an archive.
fn template_of(chart: &str, version: &str, namespace: &str, values: &[&str]) -> Output {
    let mut arguments =
        vec!["template", "tessera", chart, "--kube-version", version, "--namespace", namespace];
    arguments.extend(values.iter().flat_map(|value| ["--set", value]));
    helm(&arguments)
}

/// Returns the objects of manifests by kind, namespace and name, without the hooks of Helm.
fn objects(manifests: &str) -> BTreeMap<String, Value> {
    let all: Vec<Value> = serde_saphyr::from_multiple(manifests).unwrap();
    let all = all.into_iter().filter(|object| !object.is_null());
    let all = all.filter(|object| object["metadata"]["annotations"]["helm.sh/hook"].is_null());
    let name = |object: &Value| {
        let meta = &object["metadata"];
        format!("{} {} {}", object["kind"], meta["namespace"], meta["name"])
    };
    let mut found = BTreeMap::new();
    for object in all {
        assert!(found.insert(name(&object), object.clone()).is_none(), "twice: {}", name(&object));
    }
    found
}

fn rendered(values: &[&str]) -> BTreeMap<String, Value> {
    objects(&text(&template("1.36.4", "kube-system", values)))
}

#[test]
fn helm_accepts_the_chart() {
    let linted = helm(&["lint", "--strict", "--quiet", "deploy/chart"]);
    assert!(linted.status.success(), "{}", String::from_utf8_lossy(&linted.stdout));
}

/// What an administrator reads after the installation fits the chosen values.
#[test]
fn the_notes_say_what_to_do_next() {
    let notes = |values: &[&str]| {
        let mut arguments =
            vec!["install", "tessera", "deploy/chart", "--dry-run=client", "--namespace", "gpu"];
        arguments.extend(values.iter().flat_map(|value| ["--set", value]));
        let shown = text(&helm(&arguments));
        shown.split_once("\nNOTES:\n").unwrap().1.to_owned()
    };
    let (connect, restore) =
        ("deploy/scheduler/kube-scheduler-edit.yaml", "restore kube-scheduler's configuration");
    let named = "spec.schedulerName: tessera when they are created";
    let extender = notes(&[]);
    for part in [
        connect,
        restore,
        "helm -n gpu test tessera",
        "kubectl -n gpu rollout status daemonset/tessera-agent",
    ] {
        assert!(extender.contains(part), "{part:?} is missing in:\n{extender}");
    }
    assert!(!extender.contains(named), "{extender}");
    let second = notes(&["scheduler.mode=second"]);
    assert!(second.contains(named) && !second.contains("or use claims"), "{second}");
    assert!(
        !second.contains(connect) && !second.contains(restore),
        "kube-scheduler stays as it is:\n{second}"
    );
    let claims = notes(&["scheduler.mode=second", "scheduler.dra=true"]);
    assert!(claims.contains("Pods that request GPUs or use claims get"), "{claims}");
    let by_hand = notes(&["scheduler.mode=second", "scheduler.setSchedulerName=false"]);
    assert!(by_hand.contains("They need spec.schedulerName: tessera."), "{by_hand}");
    let agents = notes(&["scheduler.enabled=false"]);
    assert!(!agents.contains("dashboard") && !agents.contains(restore), "{agents}");
}

#[test]
fn the_version_is_that_of_the_program() {
    let chart = std::fs::read_to_string(root().join("deploy/chart/Chart.yaml")).unwrap();
    for key in ["version", "appVersion"] {
        assert!(chart.contains(&format!("\n{key}: {}\n", env!("CARGO_PKG_VERSION"))), "{key}");
    }
}

#[test]
fn the_files_for_kustomize_are_made_from_the_chart() {
    let folder = tempfile::tempdir().unwrap();
    text(&Command::new(root().join("deploy/render")).arg(folder.path()).output().unwrap());
    let mut compared = 0;
    for part in std::fs::read_dir(folder.path()).unwrap() {
        for file in std::fs::read_dir(part.unwrap().path()).unwrap() {
            let file = file.unwrap().path();
            let name = file.strip_prefix(folder.path()).unwrap();
            let committed = std::fs::read_to_string(root().join("deploy").join(name)).unwrap_or_default();
            let made = std::fs::read_to_string(&file).unwrap();
            assert!(made == committed, "deploy/{} differs: run deploy/render", name.display());
            compared += 1;
        }
    }
    assert!(compared > 12, "{compared}");
}

/// Each directory for kustomize installs what the chart does with these values.
#[test]
fn kustomize_and_the_chart_install_the_same() {
    let cases: [(&str, &[&str]); 6] = [
        ("agent", &["scheduler.enabled=false"]),
        ("agent-plain-runc", &["scheduler.enabled=false", "agent.driver=host"]),
        ("agent-dra", &["scheduler.enabled=false", "agent.offer=dra"]),
        ("scheduler", &["agent.enabled=false"]),
        ("scheduler-second", &["agent.enabled=false", "scheduler.mode=second"]),
        (
            "monitoring",
            &["monitoring.scrape=podMonitor", "monitoring.alerts=true", "monitoring.dashboard=true"],
        ),
    ];
    for (part, values) in cases {
        let kustomized = kustomized(&root().join("deploy").join(part));
        let mut chart = rendered(values);
        if part == "monitoring" {
            let others = rendered(&[]);
            chart.retain(|name, _| !others.contains_key(name));
        }
        assert_same(part, &kustomized, &chart);
    }
}

fn kustomized(folder: &Path) -> BTreeMap<String, Value> {
    objects(&text(&Command::new("kubectl").arg("kustomize").arg(folder).output().unwrap()))
}

fn assert_same(part: &str, kustomized: &BTreeMap<String, Value>, chart: &BTreeMap<String, Value>) {
    let names = |objects: &BTreeMap<String, Value>| objects.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(kustomized), names(chart), "{part}");
    for (name, object) in kustomized {
        assert_eq!(sorted(object), sorted(&chart[name]), "{part}: {name}");
    }
}

/// The directory with the webhook installs what the chart does, apart from the certificate, which each makes itself.
#[test]
fn kustomize_and_the_chart_install_the_same_webhook() {
    let part = "scheduler-second-webhook";
    let folder = tempfile::tempdir().unwrap();
    let copied = Command::new("cp").arg("-r").arg(root().join("deploy")).arg(folder.path()).output().unwrap();
    text(&copied);
    let folder = folder.path().join("deploy").join(part);
    text(&Command::new(folder.join("certificate")).output().unwrap());
    let mut kustomized = kustomized(&folder);
    let mut chart =
        rendered(&["agent.enabled=false", "scheduler.mode=second", "scheduler.schedulerNameBy=webhook"]);
    for objects in [&mut kustomized, &mut chart] {
        let secret =
            &mut objects.get_mut(r#""Secret" "kube-system" "tessera-scheduler-webhook""#).unwrap()["data"];
        let authority = secret["ca.crt"].clone();
        assert_eq!(secret.as_object().unwrap().keys().collect::<Vec<_>>(), ["ca.crt", "tls.crt", "tls.key"]);
        *secret = Value::Null;
        let webhook = r#""MutatingWebhookConfiguration" null "tessera-scheduler-name""#;
        let client = &mut objects.get_mut(webhook).unwrap()["webhooks"][0]["clientConfig"];
        assert_eq!(client["caBundle"].take(), authority);
    }
    assert_same(part, &kustomized, &chart);
}

/// Returns an object with its lists of mounts, volumes, ports and variables in one order. kustomize merges them.
fn sorted(object: &Value) -> Value {
    match object {
        Value::Array(items) => {
            let mut items: Vec<Value> = items.iter().map(sorted).collect();
            if items.iter().all(|item| item["name"].is_string()) {
                items.sort_by_key(|item| item["name"].to_string());
            }
            Value::Array(items)
        }
        Value::Object(fields) => {
            Value::Object(fields.iter().map(|(key, value)| (key.clone(), sorted(value))).collect())
        }
        other => other.clone(),
    }
}

#[test]
fn common_values_are_rendered() {
    let pod =
        |objects: &BTreeMap<String, Value>, name: &str| objects[name]["spec"]["template"]["spec"].clone();
    let (agent, scheduler) =
        (r#""DaemonSet" "kube-system" "tessera-agent""#, r#""Deployment" "kube-system" "tessera-scheduler""#);
    let found = rendered(&[
        "image.repository=example.com/gpu/tessera",
        "image.tag=2.0.0",
        "agent.dialects={nvidia,vcuda}",
        "agent.memoryUnit=256MiB",
        "agent.nodeSelector.pool=gpus",
        "agent.runtimeClassName=",
        "agent.tolerations[0].key=gpus",
        "agent.tolerations[0].operator=Exists",
        "agent.resources.limits.memory=256Mi",
        "scheduler.priorityClassName=mine",
        "scheduler.tolerations[0].key=system",
        "scheduler.tolerations[0].effect=NoExecute",
        "scheduler.resources.requests.cpu=2",
        "scheduler.replicas=3",
        "scheduler.extraArgs={--pass-on=all}",
    ]);
    let agent_pod = pod(&found, agent);
    assert_eq!(agent_pod["containers"][0]["image"], "example.com/gpu/tessera:2.0.0");
    assert_eq!(agent_pod["initContainers"][0]["image"], "example.com/gpu/tessera:2.0.0");
    let arguments = agent_pod["containers"][0]["args"].to_string();
    assert!(arguments.contains("--dialects=nvidia,vcuda\",\"--memory-unit=256MiB"), "{arguments}");
    assert_eq!(agent_pod["nodeSelector"]["pool"], "gpus");
    assert!(agent_pod["runtimeClassName"].is_null());
    assert_eq!(agent_pod["tolerations"], json!([{ "key": "gpus", "operator": "Exists" }]));
    let resources = &agent_pod["containers"][0]["resources"];
    assert_eq!(resources["limits"], json!({ "memory": "256Mi" }));
    assert_eq!(resources["requests"], json!({ "cpu": "50m", "memory": "40Mi" }), "the other defaults stay");
    let scheduler_pod = pod(&found, scheduler);
    assert_eq!(scheduler_pod["tolerations"], json!([{ "key": "system", "effect": "NoExecute" }]));
    assert_eq!(
        scheduler_pod["containers"][0]["resources"]["requests"],
        json!({ "cpu": 2, "memory": "200Mi" })
    );
    assert_eq!(found[scheduler]["spec"]["replicas"], 3);
    assert_eq!(pod(&found, scheduler)["priorityClassName"], "mine");

    let digest = format!("image.digest=sha256:{}", "a".repeat(64));
    let image = pod(&rendered(&[&digest]), agent)["containers"][0]["image"].clone();
    assert_eq!(image, format!("tessera@sha256:{}", "a".repeat(64)));

    let existing = rendered(&["tls.source=existing", "tls.existingSecret=mine"]);
    assert!(!existing.keys().any(|name| name.contains("Secret")), "{:?}", existing.keys());
    let strategy = |objects: &BTreeMap<String, Value>| objects[scheduler]["spec"]["strategy"].clone();
    let unavailable = |objects| strategy(objects)["rollingUpdate"]["maxUnavailable"].clone();
    assert_eq!((unavailable(&existing), unavailable(&found)), (1.into(), 0.into()));
    assert!(pod(&existing, scheduler)["volumes"].to_string().contains(r#""secretName":"mine""#));

    let limited = rendered(&["scheduler.quotas.enabled=true", "scheduler.quotas.configMap=limits"]);
    let file = &limited[r#""ConfigMap" "kube-system" "tessera-scheduler-quotas""#]["data"]["quotas.json"];
    let file: Value = serde_json::from_str(file.as_str().unwrap()).unwrap();
    assert_eq!(file["QuotaConfigMapName"], "limits");
    let limited = pod(&limited, scheduler)["containers"][0].clone();
    assert!(
        limited["args"].to_string().contains("--quota-config=/etc/tessera/quotas/quotas.json"),
        "{limited}"
    );
    assert!(limited["volumeMounts"].to_string().contains("/etc/tessera/quotas"), "{limited}");

    let monitored = rendered(&["monitoring.scrape=annotations", "agent.pagesAccess=open"]);
    assert!(monitored.contains_key(r#""Service" "kube-system" "tessera-agent-metrics""#));
    let bare = rendered(&["admissionPolicies.enabled=false", "networkPolicies.enabled=false"]);
    assert!(!bare.keys().any(|name| name.contains("Policy")), "{:?}", bare.keys());
}

/// The values in the recipes of `docs/clusters.md` exist, and each changes what is installed.
#[test]
fn the_chart_accepts_the_recipes_for_kinds_of_clusters() {
    let page = std::fs::read_to_string(root().join("docs/clusters.md")).unwrap();
    let parts = ["agent.", "scheduler.", "image.", "tls.", "monitoring."];
    let mut accepted = 0;
    for version in ["1.33.5", "1.36.4"] {
        let plain = objects(&text(&template(version, "kube-system", &[])));
        for row in page.lines().filter(|line| line.starts_with("| ")) {
            let Some(cell) = row.split(" | ").nth(1) else { panic!("no values: {row}") };
            let words = cell.split('`').skip(1).step_by(2);
            let values: Vec<&str> = words
                .filter(|word| word.contains('=') && parts.iter().any(|part| word.starts_with(part)))
                .collect();
            let found = objects(&text(&template(version, "kube-system", &values)));
            assert!(values.is_empty() || found != plain, "these values change nothing: {values:?}");
            accepted += values.len();
        }
    }
    assert!(accepted > 15, "only {accepted} values were found");
}

#[test]
fn the_second_kube_scheduler_has_the_version_of_the_cluster() {
    for (version, tag, by_policy) in [
        ("1.36.4", "v1.36.4", true),
        ("v1.33.5-gke.1162000", "v1.33.5", false),
        ("1.34.1-eks-3025e55", "v1.34.1", false),
        ("v1.33.5+k3s1", "v1.33.5", false),
        ("v1.36.4+rke2r1", "v1.36.4", true),
    ] {
        let found = objects(&text(&template(version, "gpus", &["scheduler.mode=second"])));
        let deployment = &found[r#""Deployment" "gpus" "tessera-scheduler""#];
        let image = &deployment["spec"]["template"]["spec"]["containers"][1]["image"];
        assert_eq!(*image, format!("registry.k8s.io/kube-scheduler:{tag}"));
        let policy = found.keys().any(|name| name.contains("MutatingAdmissionPolicy"));
        assert_eq!(policy, by_policy, "{version}");
        let webhook = r#""MutatingWebhookConfiguration" null "tessera-scheduler-name""#;
        assert_eq!(found.contains_key(webhook), !by_policy, "{version}");
    }
}

/// On clusters without the policy, the scheduler itself answers for the same pods.
#[test]
fn the_webhook_covers_the_pods_of_the_policy() {
    let second = |version: &str, by: &str| {
        let by = format!("scheduler.schedulerNameBy={by}");
        objects(&text(&template(version, "gpus", &["scheduler.mode=second", &by])))
    };
    let (old, new) = (second("1.33.5", "auto"), second("1.36.4", "auto"));
    let webhook = &old[r#""MutatingWebhookConfiguration" null "tessera-scheduler-name""#]["webhooks"][0];
    let policy = &new[r#""MutatingAdmissionPolicy" null "tessera-scheduler-name""#]["spec"];
    assert_eq!(webhook["matchConditions"], policy["matchConditions"]);
    for selector in ["namespaceSelector", "objectSelector"] {
        assert!(webhook[selector].is_object());
        assert_eq!(webhook[selector], policy["matchConstraints"][selector], "{selector}");
    }
    let secret = &old[r#""Secret" "gpus" "tessera-scheduler-webhook""#];
    assert_eq!(webhook["clientConfig"]["caBundle"], secret["data"]["ca.crt"]);
    let pod = &old[r#""Deployment" "gpus" "tessera-scheduler""#]["spec"]["template"]["spec"];
    let arguments = pod["containers"][0]["args"].to_string();
    assert!(arguments.contains("--webhook-listen=:12348"), "{arguments}");
    let allowed = old[r#""NetworkPolicy" "gpus" "tessera-scheduler""#]["spec"]["ingress"].to_string();
    assert!(allowed.contains(r#""port":"webhook""#), "{allowed}");
    let chosen = second("1.36.4", "webhook");
    assert!(!chosen.keys().any(|name| name.contains("MutatingAdmissionPolicy")));
    assert!(chosen.keys().any(|name| name.contains("MutatingWebhookConfiguration")));
    let none = objects(&text(&template(
        "1.33.5",
        "gpus",
        &["scheduler.mode=second", "scheduler.setSchedulerName=false"],
    )));
    assert!(!none.keys().any(|name| name.contains("Mutating")), "{:?}", none.keys());
}

/// Pods with claims name no resource. Only a scheduler that serves claims gets them. MIG instances are counted by
/// kube-scheduler alone, so pods with them keep their scheduler.
#[test]
fn pods_with_claims_get_the_scheduler_that_serves_claims() {
    for (version, name) in [
        ("1.34.2", r#""MutatingWebhookConfiguration" null "tessera-scheduler-name""#),
        ("1.36.4", r#""MutatingAdmissionPolicy" null "tessera-scheduler-name""#),
    ] {
        for dra in [false, true] {
            let serves_claims = format!("scheduler.dra={dra}");
            let values = ["scheduler.mode=second", serves_claims.as_str()];
            let found = objects(&text(&template(version, "gpus", &values)));
            let object = &found[name];
            let policy = if object["webhooks"].is_array() { &object["webhooks"][0] } else { &object["spec"] };
            let conditions = policy["matchConditions"].as_array().unwrap();
            let expression = conditions[1]["expression"].as_str().unwrap();
            let matches_claims =
                expression.ends_with("|| object.spec.?resourceClaims.orValue([]).size() > 0");
            assert_eq!(matches_claims, dra, "{expression}");
            assert!(
                expression.contains("'nvidia.com/gpu'") || expression.contains("'tencent.com/vcuda-core'")
            );
            assert!(!expression.contains("mig-"), "{expression}");
            let labels = [&policy["objectSelector"], &policy["matchConstraints"]["objectSelector"]];
            assert!(labels.iter().any(|selector| selector.to_string().contains("tessera.dev/scheduler")));
        }
    }
}

/// Every object with a namespace is in that of the release, except those that other tools read in `kube-system`.
#[test]
fn everything_is_in_the_namespace_of_the_release() {
    for mode in ["extender", "second"] {
        let mode = format!("scheduler.mode={mode}");
        let found = objects(&text(&template("1.36.4", "gpus", &[&mode, "monitoring.scrape=podMonitor"])));
        let elsewhere: Vec<&String> = found
            .iter()
            .filter(|(_, object)| {
                let namespace = &object["metadata"]["namespace"];
                !namespace.is_null() && namespace != "gpus"
            })
            .map(|(name, _)| name)
            .collect();
        assert!(
            elsewhere.iter().all(|name| name.contains(r#"Role"#) || name.contains("RoleBinding")),
            "{elsewhere:?}"
        );
        for object in found.values().filter(|object| object["subjects"].is_array()) {
            assert_eq!(object["subjects"][0]["namespace"], "gpus", "{object}");
        }
    }
}

#[test]
fn the_schema_rejects_mistakes() {
    for (value, named) in [
        ("agent.dialects={cuda}", "/agent/dialects"),
        ("agent.dialects=null", "missing property 'dialects'"),
        ("agent.memoryUnit=GB", "/agent/memoryUnit"),
        ("agent.driver=docker", "/agent/driver"),
        ("agent.runtimeclass=nvidia", "runtimeclass"),
        ("scheduler.mode=third", "/scheduler/mode"),
        ("scheduler.schedulerNameBy=hand", "/scheduler/schedulerNameBy"),
        ("scheduler.replicas=0", "/scheduler/replicas"),
        ("scheduler.policy=fastest", "/scheduler/policy"),
        ("scheduler.gangTimeout=soon", "/scheduler/gangTimeout"),
        ("scheduler.quotas.configMap=", "/scheduler/quotas/configMap"),
        ("scheduler.quotas.enabled=2", "/scheduler/quotas/enabled"),
        ("scheduler.kubeScheduler.percentageOfNodesToScore=200", "percentageOfNodesToScore"),
        ("agent.offer=claims", "/agent/offer"),
        ("agent.kubeletRoot=kubelet", "/agent/kubeletRoot"),
        ("agent.grantsMemoryMiB=0", "/agent/grantsMemoryMiB"),
        ("agent.maxUnavailable=many", "/agent/maxUnavailable"),
        ("agent.pagesAccess=nobody", "/agent/pagesAccess"),
        ("image.tag=a b", "/image/tag"),
        ("image.digest=sha256:1", "/image/digest"),
        ("image.repository=", "/image/repository"),
        ("monitoring.scrape=annotations", "/agent/pagesAccess"),
        ("tls.source=existing", "/tls/existingSecret"),
        ("tolerations=1", "tolerations"),
    ] {
        let refused = template("1.36.4", "kube-system", &[value]);
        let complaint = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && complaint.contains(named), "{value}: {complaint}");
    }
    let too_old = |version: &str, values: &[&str], named: &str| {
        let refused = template(version, "kube-system", values);
        let complaint = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && complaint.contains(named), "{version}: {complaint}");
    };
    too_old("1.29.0", &[], "incompatible with Kubernetes");
    too_old("1.33.5", &["agent.offer=dra"], "agent.offer=dra needs Kubernetes 1.34");
    too_old(
        "1.35.0",
        &["scheduler.mode=second", "scheduler.schedulerNameBy=policy"],
        "schedulerNameBy=policy needs Kubernetes 1.36",
    );
}

/// The pod of `helm test` requests what the agents offer with the same values.
#[test]
fn helm_test_requests_what_the_agents_offer() {
    let test = |values: &[&str]| -> Vec<Value> {
        let shown = text(&template("1.36.4", "gpus", values));
        let all: Vec<Value> = serde_saphyr::from_multiple(&shown).unwrap();
        all.into_iter().filter(|object| object["metadata"]["name"] == "tessera-test-share").collect()
    };
    let resources = |objects: &[Value]| {
        let pod = objects.iter().find(|object| object["kind"] == "Pod").unwrap();
        pod["spec"]["containers"][0]["resources"].clone()
    };
    for (values, named) in [
        ("agent.memoryUnit=GiB", "tencent.com/vcuda-core"),
        ("agent.dialects={gpushare}", "aliyun.com/gpu-mem"),
        ("agent.dialects={nvidia}", "nvidia.com/gpu"),
        ("agent.dialects={hami}", "nvidia.com/gpumem"),
        ("agent.offer=both", "tencent.com/vcuda-core"),
    ] {
        let found = resources(&test(&[values]));
        assert!(found["limits"][named].is_string() && found["claims"].is_null(), "{values}: {found}");
    }
    let claims = test(&["agent.offer=dra"]);
    assert_eq!(resources(&claims), json!({ "claims": [{ "name": "gpu" }] }));
    let template = claims.iter().find(|object| object["kind"] == "ResourceClaimTemplate").unwrap();
    assert!(template["metadata"]["annotations"]["helm.sh/hook"] == "test", "{template}");
    assert!(test(&["agent.enabled=false"]).is_empty());
}
