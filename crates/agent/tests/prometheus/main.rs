//! A real Prometheus scrapes a real agent, evaluates the alerts of `deploy/monitoring` and every
//! query of its dashboard.
//!
//! `cargo test -p tessera-agent --test prometheus`; needs Debian's package `prometheus`.

#![allow(clippy::unwrap_used, reason = "test helpers may panic like tests")]

#[path = "../common/mod.rs"]
mod common;
mod server;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::Ordering,
};

use common::{RegistrationWay, World, fixtures::container_id, load::poll_foreign};
use serde_json::Value;
use server::{Job, Prometheus, promtool};
use tessera_agent::exporter::families::{MetricsOptions, VOCABULARIES};
use tessera_limits::{files, memory_account::ProcessIdentity};

fn deploy(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/monitoring").join(file)
}

/// Returns the rules in the form of Prometheus: the part of the operator's object below `spec`.
fn rules() -> String {
    let text = std::fs::read_to_string(deploy("alerts.yaml")).unwrap();
    let (_, spec) = text.split_once("\nspec:\n").unwrap();
    spec.lines().fold(String::new(), |mut rules, line| {
        let _ = writeln!(rules, "{}", line.strip_prefix("  ").unwrap_or(line));
        rules
    })
}

/// Returns every query of the dashboard with its variables replaced.
fn queries() -> Vec<String> {
    let dashboard: Value =
        serde_json::from_str(&std::fs::read_to_string(deploy("dashboard.json")).unwrap()).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let all: Vec<String> = targets.map(|target| target["expr"].as_str().unwrap().to_owned()).collect();
    assert!(all.len() > 20, "{}", all.len());
    let fill =
        |query: String| query.replace("$__rate_interval", "10s").replace("$node", ".*").replace("$gpu", ".*");
    all.into_iter().map(fill).collect()
}

/// The queries of HAMi's own dashboard, `dashboards/hami-vgpu-dashboard.json`, with its variables replaced.
const HAMI_QUERIES: [&str; 17] = [
    r#"count(hami_gpu_memory_limit_bytes{node=~".*"})"#,
    r#"sum(hami_gpu_memory_limit_bytes{node=~".*"})"#,
    r#"sum(hami_gpu_memory_allocated_bytes{node=~".*"}) > 0"#,
    r#"100 * sum(hami_gpu_memory_allocated_bytes{node=~".*"}) / sum(hami_gpu_memory_limit_bytes{node=~".*"}) > 0"#,
    r#"sum(hami_gpu_shared_count{node=~".*"}) > 0"#,
    r#"hami_host_gpu_memory_used_bytes and on (device_uuid) hami_gpu_memory_limit_bytes{node=~".*"}"#,
    r#"hami_host_gpu_utilization_ratio and on (device_uuid) hami_gpu_memory_limit_bytes{node=~".*"}"#,
    r#"sum by (node) (hami_gpu_memory_allocated_bytes{node=~".*"})"#,
    r#"sum by (node) (hami_gpu_memory_limit_bytes{node=~".*"})"#,
    r#"hami_node_gpu_memory_allocated_ratio{node=~".*"} > 0"#,
    r#"hami_gpu_core_allocated_ratio{node=~".*"} > 0"#,
    r#"hami_gpu_shared_count{node=~".*"} > 0"#,
    r#"hami_vgpu_memory_used_bytes{namespace=~".*"} > 0"#,
    r#"hami_vgpu_memory_limit_bytes{namespace=~".*"} > 0"#,
    r#"hami_container_device_utilization_ratio{namespace=~".*"} > 0"#,
    r#"100 * hami_vgpu_memory_used_bytes{namespace=~".*"} / hami_vgpu_memory_limit_bytes{namespace=~".*"} > 0"#,
    r#"topk(10, hami_vgpu_memory_used_bytes{namespace=~".*"})"#,
];

/// The rule for prometheus-adapter in the comment of `examples/deployment-with-hpa.yaml`.
struct AdapterRule {
    /// Selects the series that the adapter discovers.
    series: String,
    /// Name of the metric that the autoscaler reads.
    name: String,
    /// Template of the query.
    query: String,
}

/// Returns the rule of the example, and the metric that its autoscaler asks for.
fn autoscaling_example() -> (AdapterRule, String) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/deployment-with-hpa.yaml");
    let text = std::fs::read_to_string(file).unwrap();
    let (comment, manifests) = text.split_once("\napiVersion:").unwrap();
    let between = |text: &str, begin: &str, end: &str| -> String {
        let (_, rest) = text.split_once(begin).unwrap();
        rest.split_once(end).map_or(rest, |(part, _)| part).trim().to_owned()
    };
    let rule = AdapterRule {
        series: between(comment, "seriesQuery: '", "'\n"),
        name: between(comment, "name: { as: ", " }"),
        query: between(comment, "metricsQuery: >-\n", "\nEND").replace('#', ""),
    };
    (rule, between(manifests, "metric:\n          name: ", "\n"))
}

/// Returns Tessera's metrics in a query.
fn names(query: &str) -> BTreeSet<String> {
    let words = query.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|word| word.starts_with("tessera_")).map(str::to_owned).collect()
}

/// Accounts for ten seconds of waiting, as the library in the container would.
fn wait_for_windows(grant: &Path) {
    let account = files::open_account(grant).unwrap();
    let place = account.claim(ProcessIdentity { id: 41, started_ticks: 41 }, 41, |_| {}).unwrap();
    account.slot(place).waited.store(10_000_000_000, Ordering::Relaxed);
}

async fn busy_world() -> World {
    let options = MetricsOptions {
        vocabularies: VOCABULARIES.iter().map(|(_, vocabulary)| *vocabulary).collect(),
        processes: true,
        ..MetricsOptions::default()
    };
    let world = World::with_metrics(RegistrationWay::Registry, options).await;
    let share = [("tencent.com/vcuda-core", "20"), ("tencent.com/vcuda-memory", "4")];
    world.running(1, "train", &share, 3).await;
    world.running(2, "idle", &share, 3).await;
    world.process(41, 3, 2048, 40, &container_id(1));
    world.process(42, 5, 512, 10, &container_id(2));
    // A GPU that is busy all the time has reduced clocks.
    world.process(43, 6, 512, 100, &container_id(2));
    wait_for_windows(&world.grants().join("uid-train/main"));
    std::fs::write(world.events(), "3 xid 79\n").unwrap();
    world.api.until("the unhealthy GPU", |api| *api.unhealthy.lock().unwrap() == Some(vec![3])).await;
    world.api.until_noticed("GpuShareEscaped").await;
    world.until_measured().await;
    world
}

#[test]
fn rules_are_valid_and_fire_on_the_right_series() {
    let (directory, rules, tests) = (tempfile::tempdir().unwrap(), rules(), include_str!("alerts.yaml"));
    let alerts: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(alerts.len() >= 20, "{alerts:?}");
    // An alert whose test expects nothing never fires in it.
    let fires = |alert: &&str| tests.contains(&format!("alertname: {alert}\n        exp_alerts:\n"));
    let silent: Vec<&&str> = alerts.iter().filter(|alert| !fires(alert)).collect();
    assert!(silent.is_empty(), "no test lets these alerts fire: {silent:?}");
    std::fs::write(directory.path().join("rules.yaml"), &rules).unwrap();
    std::fs::write(directory.path().join("tests.yaml"), tests).unwrap();
    promtool(directory.path(), &["check", "rules", "rules.yaml"], None);
    promtool(directory.path(), &["test", "rules", "tests.yaml"], None);
}

#[tokio::test(flavor = "multi_thread")]
async fn native_families_pass_the_linter() {
    let world = busy_world().await;
    let text = world.page("/metrics").await;
    let ours = |line: &&str| {
        line.trim_start_matches("# TYPE ").trim_start_matches("# HELP ").starts_with("tessera_")
    };
    let ours: String = text.lines().filter(ours).fold(String::new(), |mut ours, line| {
        let _ = writeln!(ours, "{line}");
        ours
    });
    assert!(ours.lines().count() > 200);
    promtool(Path::new("."), &["check", "metrics"], Some(&ours));
}

#[tokio::test(flavor = "multi_thread")]
async fn prometheus_scrapes_the_agent_and_evaluates_alerts_and_dashboard() {
    let world = busy_world().await;
    let pages = ["/metrics", "/metrics/nodes", "/metric"];
    let jobs = pages.map(|path| Job { name: path, path, target: world.address, relabelings: "" });
    let prometheus = Prometheus::start(&jobs, &rules());
    for path in ["/metrics", "/metrics/nodes", "/metric"] {
        prometheus.until_some(&format!("up{{job=\"{path}\"}} == 1")).await;
        prometheus.until_some(&format!("scrape_samples_scraped{{job=\"{path}\"}} > 0")).await;
    }
    prometheus.until_some("rate(tessera_container_busy_seconds_total{pod=\"train\"}[10s]) > 0.35").await;

    // Each GPU has been sampled twice by now.
    let text = world.page("/metrics").await;
    let known: BTreeSet<String> =
        text.lines().filter_map(|line| line.split(['{', ' ']).next()).map(str::to_owned).collect();
    prometheus.until_some("tessera:container_busy:increase30m").await;
    // The test of the demo evaluates the queries about the scheduler.
    for query in queries().into_iter().filter(|query| !query.contains("tessera_scheduler_")) {
        // The pages of this agent are served without a certificate.
        if query.contains("tessera_certificate_") {
            continue;
        }
        prometheus.until_some(&query).await;
        for name in names(&query) {
            assert!(
                known.contains(&name) || name == "tessera_container_usage_unknown",
                "{name} in {query} is not a metric of the agent"
            );
        }
    }
    let is_about_agent = |query: &&str| {
        !["tessera_scheduler_", "tessera_certificate_"].iter().any(|name| query.contains(name))
    };
    for query in rules().lines().filter(is_about_agent) {
        for name in names(query) {
            assert!(
                known.contains(&name) || !query.contains("expr") || name == "tessera_container_usage_unknown",
                "{name} in {query} is not a metric of the agent"
            );
        }
    }

    // prometheus-adapter fills the template like this when the autoscaler asks for the metric of two pods.
    let (rule, asked) = autoscaling_example();
    assert_eq!(rule.name, asked, "the autoscaler asks for the metric of the rule");
    assert!(!prometheus.query(&rule.series).await.is_empty(), "{}", rule.series);
    let filled = [
        ("<<.Series>>", "tessera_container_busy_seconds_total"),
        ("<<.LabelMatchers>>", "namespace=\"team\",pod=~\"idle|train\""),
        ("<<.GroupBy>>", "pod"),
        ("[2m]", "[10s]"),
    ];
    let query = filled.iter().fold(rule.query, |query, (name, value)| query.replace(name, value));
    assert!(!query.contains("<<"), "{query}");
    let found = prometheus.query(&query).await;
    let values: BTreeMap<&str, f64> = found
        .iter()
        .map(|series| {
            let value = series["value"][1].as_str().unwrap().parse().unwrap();
            (series["metric"]["pod"].as_str().unwrap(), value)
        })
        .collect();
    assert_eq!(values.keys().collect::<Vec<_>>(), [&"idle", &"train"], "{query}: {found:?}");
    // 40 % of a GPU, of which the pod was granted 20 %.
    assert!(values["train"] > 1.5 && values["train"] < 2.5, "{query}: {found:?}");

    for query in HAMI_QUERIES {
        let found = prometheus.query(query).await;
        assert!(!found.is_empty(), "{query}");
    }

    // These are the queries of Grafana's dashboard 12239.
    for name in [
        "DCGM_FI_DEV_GPU_TEMP",
        "DCGM_FI_DEV_POWER_USAGE",
        "DCGM_FI_DEV_SM_CLOCK",
        "DCGM_FI_DEV_GPU_UTIL",
        "DCGM_FI_DEV_FB_USED",
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    ] {
        let found = prometheus.query(&format!("{name}{{instance=~\".+\", gpu=~\"3\"}}")).await;
        assert!(!found.is_empty(), "{name}");
    }

    let rules = poll_foreign("all rules to be evaluated", async || {
        let rules = prometheus.rules().await;
        rules.iter().all(|rule| rule["health"] != "unknown").then_some(rules)
    })
    .await;
    assert!(rules.len() > 8);
    for rule in &rules {
        assert_eq!(rule["health"], "ok", "{rule}");
    }
    let state = |name: &str| rules.iter().find(|rule| rule["name"] == name).unwrap()["state"].clone();
    assert_eq!(state("TesseraGpuXid"), "firing");
    assert_eq!(state("TesseraEscapedProcess"), "pending");
    assert_eq!(state("TesseraOverMemoryShare"), "pending");
    assert_eq!(state("TesseraGpuNotRead"), "inactive");
}

#[test]
fn kustomize_accepts_the_manifests() {
    let Ok(rendered) = Command::new("kubectl").args(["kustomize", "."]).current_dir(deploy("")).output()
    else {
        panic!("kubectl is missing");
    };
    let text = String::from_utf8_lossy(&rendered.stdout).into_owned();
    assert!(rendered.status.success(), "{}", String::from_utf8_lossy(&rendered.stderr));
    for kind in ["kind: PodMonitor", "kind: PrometheusRule", "kind: ConfigMap", "honorLabels: true"] {
        assert!(text.contains(kind), "{kind}");
    }
}
