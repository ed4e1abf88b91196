//! The metrics page for described GPUs with given processes and pods, compared with golden files.

#![allow(clippy::unwrap_used, reason = "test helpers may panic like tests")]

#[path = "../../../tessera/tests/book/section.rs"]
mod section;
#[path = "../stage/mod.rs"]
mod stage;
mod text;

use std::{collections::BTreeSet, path::Path};

use stage::{Stage, crowded, share, uuid};
use tessera_agent::controller::{ClaimView, ClaimedGpu, Escape};
use tessera_agent::exporter::{
    ContainerKey, ShareReport, ShareReports, Snapshot,
    families::{self, MetricsOptions, PodMemoryLabels, VOCABULARIES},
};
use tessera_core::units::PodUid;
use tessera_limits::Bytes;
use tessera_node::gpus::{GpuMemory, GpuSample, MigInstance, ProcessMemory, ProfilingCounters};
use tessera_serve::{CertificateExpiry, CertificateRole};
use tessera_wire::metrics::Format;
use text::Text;

/// Compares the text with the golden file of this name. `BLESS=1` writes the file.
fn golden(name: &str, text: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scrape/golden").join(name);
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&file, text).unwrap();
    }
    let expected = std::fs::read_to_string(&file).unwrap_or_default();
    for (number, (found, expected)) in text.lines().zip(expected.lines()).enumerate() {
        assert_eq!(found, expected, "{} line {}; BLESS=1 updates the file", file.display(), number + 1);
    }
    assert_eq!(
        text.lines().count(),
        expected.lines().count(),
        "{}; BLESS=1 updates the file",
        file.display()
    );
}

/// Returns a node with two GPUs and every kind of process.
fn busy_node() -> Stage {
    let mut stage = Stage::new(2);
    stage.pod(1, "team-a", "train-0", &[share(0, 50, 20_480)]);
    stage.pod(2, "team-a", "idle-0", &[share(1, 30, 8192)]);
    stage.pod(3, "team-b", "escape-0", &[share(1, 20, 4096)]);
    stage.pod(4, "team-b", "no-grant-0", &[]);
    // The first pod may borrow 4 GiB.
    stage.view.containers[0].memory_limits.push((0, Bytes(24 << 30)));
    for (pid, gpu, memory, busy) in [
        (100, 0, Some(8192), 40),
        (101, 0, Some(512), 10),
        (102, 0, Some(1024), 20),
        (103, 1, Some(256), 0),
        (104, 0, Some(300), 5),
        (105, 1, Some(100), 25),
        (106, 0, Some(50), 5),
        (107, 1, None, 0),
    ] {
        stage.process(pid, gpu, memory, busy);
    }
    stage.in_pod(100, "python3", 1);
    stage.in_pod(101, "a\"b\\c) {x} ,=\u{1F980}", 1);
    stage.in_pod(102, "miner", 3);
    stage.in_pod(103, "notebook", 4);
    stage.proc_entry(104, "Xorg", "0::/system.slice/display.service\n");
    stage.proc_entry(105, "tool", &format!("0::/system.slice/docker-{}.scope\n", "ab".repeat(32)));
    // Process 106 has ended and has no `/proc` entry, but the driver still reports it.
    stage.proc_entry(107, "quiet", "0::/\n");
    stage.fill_ledger();
    stage.sample();
    stage.sample();
    stage.meter.record_xid(&uuid(1).as_str().into(), 79, 1_800_000_001.5);
    let key = ContainerKey { uid: PodUid(stage::pod_uid(1)), container: "main".into() };
    let report = ShareReport {
        throttled_seconds: 1.25,
        waits: 7,
        denied_bytes: 4096,
        window_seconds: 2.5,
        busy_seconds: 2.5,
        windows: 125,
        account_overruns: 2,
    };
    stage.view.escaped = [(3, 0), (4, 1)]
        .map(|(pod, gpu)| (PodUid(stage::pod_uid(pod)), "main".into(), uuid(gpu).as_str().into(), 1))
        .into();
    stage.view.escapes = vec![(key.uid.clone(), key.container.clone(), Escape::WithoutLibrary, 2)];
    stage.meter.report(ShareReports::from([((key, uuid(0).as_str().into()), report)]), 1.0, 1.0);
    stage
}

fn everything() -> MetricsOptions {
    MetricsOptions {
        vocabularies: VOCABULARIES.iter().map(|(_, vocabulary)| *vocabulary).collect(),
        processes: true,
        version: "1.2.3",
        ..MetricsOptions::default()
    }
}

fn by_default() -> MetricsOptions {
    MetricsOptions { version: "1.2.3", ..MetricsOptions::default() }
}

#[test]
fn writes_native_and_earlier_exporters_families_by_default() {
    let snapshot = busy_node().snapshot();
    golden("default.txt", &families::metrics(&snapshot, &by_default(), Format::Plain));
    golden("default.openmetrics.txt", &families::metrics(&snapshot, &by_default(), Format::OpenMetrics));
    golden("nodes.txt", &families::metrics_of_nodes(&snapshot, Format::Plain));
    golden("metric.txt", &families::metric(&snapshot, Format::Plain));
}

#[test]
fn writes_other_projects_families_and_processes_on_request() {
    let snapshot = busy_node().snapshot();
    let options = MetricsOptions {
        vocabularies: ["pod-memory", "dcgm-pods", "cadvisor", "hami", "hami-legacy"]
            .map(|name| name.parse().unwrap())
            .into(),
        pod_memory_labels: PodMemoryLabels::Old,
        hostname_label: "hostname".into(),
        ..everything()
    };
    golden("others.txt", &families::metrics(&snapshot, &options, Format::Plain));
    let options = MetricsOptions {
        vocabularies: ["native", "pod-memory"].map(|name| name.parse().unwrap()).into(),
        max_processes: 3,
        ..everything()
    };
    let text = families::metrics(&snapshot, &options, Format::Plain);
    let of_processes = |line: &&str| line.contains("process") || line.starts_with("pod_used");
    let lines: Vec<&str> = text.lines().filter(of_processes).collect();
    golden("processes.txt", &(lines.join("\n") + "\n"));
}

/// The documents of both exporters show these series. Dashboards join the first with other metrics by
/// the GPU's UUID, and select the second by the labels of its first version.
#[test]
fn default_page_has_the_documented_labels_of_the_earlier_exporters() {
    let snapshot = busy_node().snapshot();
    let text = families::metrics(&snapshot, &by_default(), Format::Plain);
    let text = Text::parse(&text, Format::Plain);
    let of_map = text.sums("pod_and_gpu_map_info", "gpu_id");
    assert_eq!(of_map.into_keys().collect::<Vec<_>>(), [uuid(0), uuid(1)]);
    let memory = "pod_used_gpu_mem_MB";
    for (label, value) in [
        ("app_pid", "100"),
        ("gpu_name", "NVIDIA A100-SXM4-80GB"),
        ("gpu_uuid", &uuid(0)),
        ("pod_name", "train-0"),
        ("pod_namespace", "team-a"),
        ("UUID", &uuid(0)),
        ("pod", "train-0"),
        ("namespace", "team-a"),
    ] {
        assert!(text.sums(memory, label).contains_key(value), "{memory} has no {label}={value:?}");
    }
}

/// Puts GPU 0 into MIG mode with two instances. The driver then reports no busy time of the GPU or
/// of processes.
fn enable_mig(place: usize, sample: &mut GpuSample) {
    if place != 0 {
        return;
    }
    let part = |number: u32, busy: f64| MigInstance {
        uuid: format!("MIG-{number}"),
        profile: Some("1g.10gb".into()),
        gpu_instance: Some(number),
        compute_instance: Some(0),
        memory: Some(GpuMemory { total: 10 << 30, used: 1 << 30, free: 9 << 30, reserved: 0 }),
        counted: Some(ProfilingCounters { graphics: Some(busy), ..ProfilingCounters::default() }),
    };
    sample.instances = vec![part(7, 0.5), part(8, 0.0)];
    (sample.work.gpu, sample.work.processes) = (None, None);
    sample.sensors.utilization = None;
    // Process 100 is on both instances, the others are on the second.
    let mut processes = sample.processes.take().unwrap();
    let again = ProcessMemory { instance: Some(7), ..processes[0] };
    processes.iter_mut().for_each(|process| process.instance = Some(8));
    processes.insert(0, again);
    sample.processes = Some(processes);
}

#[test]
fn writes_mig_instances() {
    let mut stage = busy_node();
    let mut busy = Vec::new();
    for _ in 0..2 {
        stage.sample_with(enable_mig);
        let text = families::metrics(&stage.snapshot(), &everything(), Format::Plain);
        let text = Text::parse(&text, Format::Plain);
        busy.push(text.sums("tessera_gpu_instance_busy_seconds_total", "instance_uuid")["MIG-7"]);
    }
    assert_eq!(busy, [1.0, 2.0]);
    let text = families::metrics(&stage.snapshot(), &everything(), Format::Plain);
    let of_parts = ["instance", "GPU_I_", "mig_uuid", "MigInfo", "pid=\"100\"", "gpu_busy_ratio"];
    let lines = text.lines().filter(|line| of_parts.iter().any(|word| line.contains(word)));
    golden("parts.txt", &(lines.collect::<Vec<_>>().join("\n") + "\n"));
}

#[test]
fn leaves_out_values_of_missing_sources() {
    let mut stage = busy_node();
    stage.meter.record_failure(&uuid(0).as_str().into());
    stage.view.pods_known = false;
    stage.view.listed = false;
    stage.view.pods.clear();
    stage.view.containers.clear();
    stage.meter.set_pods(&[]);
    stage.fill_ledger();
    golden("degraded.txt", &families::metrics(&stage.snapshot(), &by_default(), Format::Plain));
}

#[test]
fn every_page_is_well_formed() {
    for stage in [busy_node(), crowded(), Stage::new(1)] {
        let snapshot = stage.snapshot();
        for format in [Format::Plain, Format::OpenMetrics] {
            let pages = [
                families::metrics(&snapshot, &everything(), format),
                families::metrics_of_nodes(&snapshot, format),
                families::metric(&snapshot, format),
            ];
            pages.iter().for_each(|page| drop(Text::parse(page, format)));
        }
    }
}

/// No value of a GPU is copied to a pod, and no usage is lost.
#[test]
fn parts_add_up_to_the_gpu() {
    for stage in [busy_node(), crowded()] {
        let text = families::metrics(&stage.snapshot(), &by_default(), Format::Plain);
        let text = Text::parse(&text, Format::Plain);
        for (whole, parts, remainder) in [
            (
                "tessera_gpu_memory_used_bytes",
                "tessera_container_memory_used_bytes",
                "tessera_gpu_memory_remainder_bytes",
            ),
            (
                "tessera_gpu_busy_seconds_total",
                "tessera_container_busy_seconds_total",
                "tessera_gpu_busy_remainder_seconds_total",
            ),
            (
                "tessera_gpu_energy_joules_total",
                "tessera_container_energy_joules_total",
                "tessera_gpu_energy_remainder_joules_total",
            ),
        ] {
            let whole = text.sums(whole, "uuid");
            assert!(!whole.is_empty());
            let (parts, remainder) = (text.sums(parts, "uuid"), text.sums(remainder, "uuid"));
            for (uuid, expected) in whole {
                let sum = parts.get(&uuid).unwrap_or(&0.0) + remainder.get(&uuid).unwrap_or(&0.0);
                assert!((sum - expected).abs() < 1e-6 * expected.max(1.0), "{uuid}: {sum} of {expected}");
            }
        }
    }
}

/// The dashboard and the alerts use only metrics that exist. The test `prometheus` runs them in a
/// real Prometheus.
#[test]
fn dashboard_and_alerts_use_existing_metrics() {
    let mut stage = busy_node();
    stage.view.cordoned = vec![0];
    let server = CertificateExpiry { role: CertificateRole::Server, unix_seconds: 2_000_000_000 };
    let with_certificate = Snapshot { certificates: vec![server], ..stage.snapshot() };
    let pages = [with_certificate, stage.snapshot_with(false)];
    let text = pages.map(|snapshot| families::metrics(&snapshot, &everything(), Format::Plain)).concat();
    let known: BTreeSet<&str> = text.lines().filter_map(|line| line.split(['{', ' ']).next()).collect();
    let monitoring = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/monitoring");
    let dashboard = std::fs::read_to_string(monitoring.join("dashboard.json")).unwrap();
    let dashboard: serde_json::Value = serde_json::from_str(&dashboard).unwrap();
    let alerts = std::fs::read_to_string(monitoring.join("alerts.yaml")).unwrap();
    let (_, alerts) = alerts.split_once("\nspec:\n").unwrap();
    for named in [dashboard["panels"].to_string(), alerts.to_owned()] {
        let words = named.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        // The test of the demo runs the queries about the scheduler.
        let is_of_agent =
            |word: &&str| word.starts_with("tessera_") && !word.starts_with("tessera_scheduler_");
        let names: BTreeSet<&str> = words.filter(is_of_agent).collect();
        assert!(names.len() > 8, "{names:?}");
        let unknown: Vec<&str> = names.into_iter().filter(|name| !known.contains(name)).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
    }
}

/// Returns the node with a claim that two containers share.
fn node_with_a_claim() -> Snapshot {
    let mut stage = busy_node();
    let key = ContainerKey { uid: PodUid("claim-uid".into()), container: "gpu".into() };
    let report = ShareReport { throttled_seconds: 1.5, waits: 3, denied_bytes: 7, ..ShareReport::default() };
    stage.meter.report(ShareReports::from([((key, uuid(1).as_str().into()), report)]), 1.0, 1.0);
    let users = ["one", "two"].map(|pod| (pod.to_owned(), "main".to_owned(), BTreeSet::from([1])));
    stage.view.claims.push(ClaimView {
        uid: PodUid("claim-uid".into()),
        namespace: "team-a".into(),
        name: "shared".into(),
        gpus: vec![ClaimedGpu { gpu: 1, hold: share(1, 30, 8192).1, directory: "gpu".into() }],
        users: users.into(),
    });
    stage.snapshot()
}

#[test]
fn a_claim_counts_once_and_names_its_containers() {
    let text = families::metrics(&node_with_a_claim(), &everything(), Format::Plain);
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("tessera_claim_")).collect();
    let labels = format!("namespace=\"team-a\",claim=\"shared\",gpu=\"1\",uuid=\"{}\"", uuid(1));
    let expected = [
        format!("tessera_claim_memory_granted_bytes{{{labels}}} 8589934592"),
        format!("tessera_claim_compute_granted_ratio{{{labels}}} 0.3"),
        format!("tessera_claim_throttled_seconds_total{{{labels}}} 1.5"),
        format!("tessera_claim_throttle_waits_total{{{labels}}} 3"),
        format!("tessera_claim_memory_denied_bytes_total{{{labels}}} 7"),
        format!("tessera_claim_window_seconds_total{{{labels}}} 0"),
        format!("tessera_claim_container_info{{{labels},pod=\"one\",container=\"main\"}} 1"),
        format!("tessera_claim_container_info{{{labels},pod=\"two\",container=\"main\"}} 1"),
    ];
    assert_eq!(lines, expected);
}

#[test]
fn the_reference_lists_every_family() {
    let mut stage = busy_node();
    let server = CertificateExpiry { role: CertificateRole::Server, unix_seconds: 2_000_000_000 };
    let busy = Snapshot { certificates: vec![server], ..stage.snapshot() };
    let hidden = stage.snapshot_with(false);
    let mut broken = stage.snapshot();
    broken.gpus[0].info.health = tessera_core::gpu::Health::Unhealthy;
    stage.sample_with(enable_mig);
    stage.sample_with(enable_mig);
    let few = MetricsOptions { max_processes: 3, ..everything() };
    let text = [busy, hidden, broken, node_with_a_claim(), stage.snapshot()]
        .map(|snapshot| families::metrics(&snapshot, &few, Format::Plain))
        .concat();
    let missing: Vec<String> =
        native_families().into_iter().filter(|name| !text.contains(&format!("# TYPE {name} "))).collect();
    assert!(missing.is_empty(), "no stage of this test writes these families: {missing:?}");
    section::check("docs/reference/metrics.md", "Agents", &section::families(&text));
}

/// Returns the names of Tessera's own families in the sources of the exporter.
fn native_families() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src/exporter/families")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let code = std::fs::read_to_string(path).unwrap();
            let literals = code.split('"').skip(1).step_by(2);
            let is_family = |text: &&str| {
                text.starts_with("tessera_")
                    && text.bytes().all(|letter| {
                        letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == b'_'
                    })
            };
            found.extend(literals.filter(is_family).map(str::to_owned));
        }
    }
    assert!(found.len() > 20, "{found:?}");
    found
}

#[test]
fn series_end_with_their_pod_and_counters_survive_processes() {
    let mut stage = busy_node();
    let busy = "tessera_container_busy_seconds_total";
    let of = |stage: &Stage, pod: &str| {
        let text = families::metrics(&stage.snapshot(), &by_default(), Format::Plain);
        Text::parse(&text, Format::Plain).sums(busy, "pod").get(pod).copied()
    };
    assert_eq!(of(&stage, "train-0"), Some(1.0));
    stage.forget_process(100);
    stage.forget_process(101);
    stage.sample();
    assert_eq!(of(&stage, "train-0"), Some(1.0), "the processes ended, the container did not");
    stage.process(200, 0, Some(10), 50);
    stage.in_pod(200, "again", 1);
    stage.sample();
    // The container has windows, so its busy time is divided with the next sample.
    stage.sample();
    assert_eq!(of(&stage, "train-0"), Some(2.0));
    let gone = stage::pod_uid(1);
    stage.view.pods.retain(|pod| pod.uid.0 != gone);
    stage.view.containers.retain(|container| container.uid.0 != gone);
    stage.meter.set_pods(&stage.view.pods);
    let text = families::metrics(&stage.snapshot(), &by_default(), Format::Plain);
    let named: BTreeSet<&str> = text.lines().filter(|line| line.contains("train-0")).collect();
    assert!(named.is_empty(), "{named:?}");
}

#[test]
fn flags_only_processes_that_are_confirmed_to_be_outside_a_grant() {
    let mut stage = busy_node();
    let escaped = |stage: &Stage| {
        let text = families::metrics(&stage.snapshot(), &by_default(), Format::Plain);
        let all = Text::parse(&text, Format::Plain).sums("tessera_container_escaped_processes", "pod");
        all.into_keys().collect::<Vec<_>>()
    };
    assert_eq!(escaped(&stage), ["escape-0", "no-grant-0"]);
    // The grant of a pod is gone before the driver has forgotten its processes.
    stage.view.escaped.clear();
    assert_eq!(escaped(&stage), [""; 0]);
}

#[test]
fn sums_up_processes_beyond_the_limit() {
    let snapshot = crowded().snapshot();
    let options = MetricsOptions { max_processes: 20, ..everything() };
    let text = families::metrics(&snapshot, &options, Format::Plain);
    let text = Text::parse(&text, Format::Plain);
    assert!(text.samples("tessera_process_memory_used_bytes").count() <= 20 + 8);
    let shown: f64 = text.sums("tessera_process_memory_used_bytes", "uuid").values().sum();
    let all: f64 = text.sums("tessera_container_memory_used_bytes", "uuid").values().sum();
    assert!((shown - all).abs() < 1.0, "{shown} of {all}");
    assert_eq!(text.sums("tessera_exporter_processes_summed_up", "uuid").values().sum::<f64>(), 180.0);
}

/// Without `hostPID` the agent cannot tell whose processes it sees. What containers use is unknown then, not zero.
#[test]
fn unknown_use_is_absent_with_its_reason() {
    let mut stage = Stage::new(2);
    stage.pod(1, "team", "train", &[share(0, 50, 20_480)]);
    stage.process(100, 0, Some(8192), 90);
    stage.fill_ledger();
    stage.sample();
    stage.sample();
    let options = MetricsOptions {
        vocabularies: VOCABULARIES.iter().map(|(_, vocabulary)| *vocabulary).collect(),
        ..MetricsOptions::default()
    };
    let text = families::metrics(&stage.snapshot_with(false), &options, Format::Plain);
    let labels = format!(r#"namespace="team",pod="train",container="main",gpu="0",uuid="{}""#, uuid(0));
    let reason = format!("tessera_container_usage_unknown{{{labels},reason=\"processes-hidden\"}} 1\n");
    assert!(text.contains(&reason), "{text}");
    assert!(text.contains(&format!("tessera_container_memory_granted_bytes{{{labels}}}")), "{text}");
    for family in [
        "tessera_container_memory_used_bytes",
        "tessera_container_busy_ratio",
        "tessera_container_busy_seconds_total",
        "tessera_container_energy_joules_total",
        "tessera_container_processes",
        "hami_vgpu_memory_used_bytes",
        "container_gpu_utilization",
        "container_accelerator_memory_used_bytes",
    ] {
        assert!(!text.contains(&format!("\n{family}{{")), "{family} is unknown: {text}");
    }
    // The use of the GPU as a whole is known.
    assert!(text.contains("\ntessera_gpu_memory_used_bytes{"), "{text}");
    let known = families::metrics(&stage.snapshot(), &options, Format::Plain);
    assert!(!known.contains("\ntessera_container_usage_unknown{"), "{known}");
    assert!(known.contains(&format!("\ntessera_container_busy_seconds_total{{{labels}}} 0\n")), "{known}");
}

/// A GPU full of pods with memory only is granted, and a broken GPU cannot be granted.
#[test]
fn free_capacity_counts_memory_and_health() {
    let mut stage = Stage::new(2);
    let memory = stage.snapshot().gpus.first().map_or(81_920, |gpu| gpu.info.memory.0);
    stage.pod(1, "team", "notebook", &[share(0, 0, memory)]);
    stage.fill_ledger();
    stage.sample();
    let mut snapshot = stage.snapshot();
    snapshot.gpus[1].info.health = tessera_core::gpu::Health::Unhealthy;
    let text = families::metrics(&snapshot, &by_default(), Format::Plain);
    let value = |family: &str, gpu: u8| {
        let begin = format!("{family}{{gpu=\"{gpu}\"");
        let line = text.lines().find(|line| line.starts_with(&begin)).unwrap();
        line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()
    };
    assert_eq!((value("tessera_gpu_granted_ratio", 0), value("tessera_gpu_granted_ratio", 1)), (1.0, 0.0));
    for family in [
        "tessera_gpu_allocatable_ratio",
        "tessera_gpu_allocatable_compute_ratio",
        "tessera_gpu_allocatable_memory_bytes",
    ] {
        assert_eq!(value(family, 1), 0.0, "{family} of a broken GPU");
    }
    assert_eq!(value("tessera_gpu_allocatable_ratio", 0), 0.0);
}

/// The families that HAMi's dashboards query about allocation.
#[test]
fn serves_the_allocation_families_of_hami() {
    let text = families::metrics(&busy_node().snapshot(), &everything(), Format::Plain);
    let gpu =
        format!(r#"{{node="{}",device_index="1",device_uuid="{}""#, busy_node().snapshot().node, uuid(1));
    for (family, value) in [
        ("hami_gpu_memory_limit_bytes", "85899345920"),
        ("hami_gpu_core_limit_ratio", "100"),
        ("hami_gpu_memory_allocated_bytes", "12884901888"),
        ("hami_gpu_shared_count", "2"),
        ("hami_gpu_core_allocated_ratio", "50"),
        ("hami_node_gpu_overview", "12884901888"),
        ("hami_node_gpu_memory_allocated_ratio", "0.15"),
    ] {
        let line = text.lines().find(|line| line.starts_with(&format!("{family}{gpu}"))).unwrap_or_default();
        assert_eq!(line.rsplit(' ').next(), Some(value), "{family}: {line:?}");
    }
    let pod = r#"{namespace="team-b",node="#;
    assert!(text.contains(&format!("\nhami_vgpu_memory_allocated_bytes{pod}")), "{text}");
    assert!(text.contains("\nvGPUCoreAllocated{podnamespace=\"team-b\""), "{text}");
}

/// Returns those of the families that have a series.
fn present<'a>(text: &str, families: &[&'a str]) -> Vec<&'a str> {
    families.iter().copied().filter(|family| text.contains(&format!("\n{family}{{"))).collect()
}

/// A cordoned GPU works. The scheduler grants nothing on it, so the metrics do not show it as free.
#[test]
fn a_cordoned_gpu_may_not_be_granted() {
    let mut stage = Stage::new(2);
    stage.fill_ledger();
    stage.sample();
    let series = |stage: &Stage| {
        let text = families::metrics(&stage.snapshot(), &by_default(), Format::Plain);
        let value = |family: &str| {
            let begin = format!("{family}{{gpu=\"1\"");
            let line = text.lines().find(|line| line.starts_with(&begin)).unwrap_or_default();
            (line.contains("reason=\"cordoned\""), line.rsplit(' ').next().unwrap().to_owned())
        };
        [
            "tessera_gpu_healthy",
            "tessera_gpu_allocatable_ratio",
            "tessera_gpu_allocatable_compute_ratio",
            "tessera_gpu_allocatable_memory_bytes",
            "tessera_gpu_withdrawn",
        ]
        .map(value)
    };
    let values = |all: [&str; 5]| all.map(|value| (value == "reason", value.replace("reason", "1")));
    let [healthy, ratio, compute, memory, withdrawn] = series(&stage).map(|(_, value)| value);
    assert_eq!([&*healthy, &ratio, &compute, &withdrawn], ["1", "1", "1", ""]);
    assert!(memory.parse::<f64>().unwrap() > 0.0, "{memory}");
    stage.view.cordoned = vec![1];
    assert_eq!(series(&stage), values(["1", "0", "0", "0", "reason"]));
}

/// Without the lists of the kubelet and of the API server, no grant is known, so nothing is free or overbooked.
#[test]
fn free_capacity_is_absent_until_the_grants_are_known() {
    const FAMILIES: [&str; 10] = [
        "tessera_gpu_granted_ratio",
        "tessera_gpu_allocatable_ratio",
        "tessera_gpu_allocatable_compute_ratio",
        "tessera_gpu_allocatable_memory_bytes",
        "tessera_gpu_overbooked",
        "hami_gpu_memory_allocated_bytes",
        "hami_gpu_core_allocated_ratio",
        "hami_gpu_shared_count",
        "hami_node_gpu_overview",
        "nodeGPUMemoryPercentage",
    ];
    for (kubelet, pods) in [(true, true), (false, true), (true, false), (false, false)] {
        let mut stage = busy_node();
        (stage.view.listed, stage.view.pods_known) = (kubelet, pods);
        let text = families::metrics(&stage.snapshot(), &everything(), Format::Plain);
        let expected = if kubelet && pods { FAMILIES.to_vec() } else { Vec::new() };
        assert_eq!(present(&text, &FAMILIES), expected, "kubelet {kubelet}, pods {pods}");
        assert_eq!(present(&text, &["hami_gpu_memory_limit_bytes", "tessera_gpu_info"]).len(), 2);
    }
}

/// A node with a container on GPU 0 that runs processes 100 and 101.
fn two_processes() -> Stage {
    let mut stage = Stage::new(1);
    stage.pod(1, "team", "train", &[share(0, 100, 81_920)]);
    stage.process(100, 0, Some(8192), 60);
    stage.process(101, 0, Some(1024), 30);
    stage.in_pod(100, "python3", 1);
    stage.in_pod(101, "python3", 1);
    stage.fill_ledger();
    stage
}

/// Returns the page after two samples with this change, and checks the reasons for unknown use.
fn page_with(reasons: &[&str], change: impl Fn(&mut GpuSample)) -> String {
    let mut stage = two_processes();
    stage.sample_with(|_, sample| change(sample));
    stage.sample_with(|_, sample| change(sample));
    let text = families::metrics(&stage.snapshot(), &everything(), Format::Plain);
    let found = Text::parse(&text, Format::Plain).sums("tessera_container_usage_unknown", "reason");
    assert_eq!(found.into_keys().collect::<Vec<_>>(), reasons);
    text
}

const MEMORY: &str = "tessera_container_memory_used_bytes";
const BUSY: [&str; 4] = [
    "tessera_container_busy_ratio",
    "tessera_container_busy_seconds_total",
    "tessera_container_last_busy_timestamp_seconds",
    "container_gpu_utilization",
];
const PROCESSES: [&str; 2] = ["tessera_gpu_processes", "tessera_container_processes"];

/// Returns the bytes of each part of the remainder.
fn remainder(text: &str) -> Vec<(String, u64)> {
    let parts = Text::parse(text, Format::Plain).sums("tessera_gpu_memory_remainder_bytes", "part");
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole numbers of bytes")]
    parts.into_iter().map(|(part, bytes)| (part, bytes as u64 >> 20)).collect()
}

fn parts<const N: usize>(expected: [(&str, u64); N]) -> Vec<(String, u64)> {
    expected.map(|(part, mib)| (part.to_owned(), mib)).to_vec()
}

#[test]
fn what_the_driver_does_not_report_is_absent_with_its_reason() {
    let text = page_with(&[], |_| {});
    assert_eq!((present(&text, &BUSY), present(&text, &PROCESSES)), (BUSY.to_vec(), PROCESSES.to_vec()));
    assert_eq!(remainder(&text), parts([("driver", 64), ("host", 0), ("unknown", 0)]));

    let text = page_with(&["processes-not-listed"], |sample| sample.processes = None);
    assert_eq!((present(&text, &PROCESSES), present(&text, &[MEMORY])), (vec![], vec![]));
    assert_eq!(present(&text, &["tessera_gpu_memory_remainder_bytes"]), [""; 0]);

    // The whole GPU is busy, and the driver does not say with which processes.
    let text = page_with(&["time-not-reported"], |sample| sample.work.processes = None);
    assert_eq!((present(&text, &BUSY), present(&text, &[MEMORY])), (vec![], vec![MEMORY]));
    assert!(text.contains("\ntessera_gpu_busy_seconds_total{"), "{text}");
    assert_eq!(present(&text, &["tessera_process_busy_ratio"]), [""; 0]);

    // The rest of the memory may be the driver's or that of process 101.
    let text = page_with(&["memory-not-reported"], |sample| {
        sample
            .processes
            .as_mut()
            .unwrap()
            .iter_mut()
            .filter(|process| process.pid == 101)
            .for_each(|process| process.bytes = None);
    });
    assert_eq!((present(&text, &BUSY), present(&text, &[MEMORY])), (BUSY.to_vec(), vec![]));
    assert_eq!(remainder(&text), parts([("host", 0), ("unknown", 8192 + 1024 + 64)]));

    let text = page_with(&["memory-not-reported"], |sample| sample.memory = None);
    assert_eq!((present(&text, &PROCESSES), present(&text, &[MEMORY])), (PROCESSES.to_vec(), vec![]));
}

/// The last interval began before the container was known, so what it says of the container is not known either.
#[test]
fn the_time_of_a_new_container_is_absent_until_an_interval_has_measured_it() {
    let mut stage = Stage::new(1);
    stage.pod(1, "team", "old", &[share(0, 50, 8192)]);
    stage.fill_ledger();
    stage.sample();
    stage.sample();
    stage.pod(2, "team", "new", &[share(0, 50, 8192)]);
    // The image of this one cannot be pulled, so it has no container and uses nothing.
    stage.pod(3, "team", "stuck", &[share(0, 0, 8192)]);
    stage.view.pods.last_mut().unwrap().containers.clear();
    stage.fill_ledger();
    let mut seen = Vec::new();
    for _ in 0..2 {
        stage.sample();
        let text = families::metrics(&stage.snapshot(), &by_default(), Format::Plain);
        let text = Text::parse(&text, Format::Plain);
        let pods: Vec<String> = text.sums("tessera_container_busy_ratio", "pod").into_keys().collect();
        let reasons: Vec<String> =
            text.sums("tessera_container_usage_unknown", "reason").into_keys().collect();
        seen.push((pods, reasons));
    }
    let strings = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let expected = [
        (strings(&["old", "stuck"]), strings(&["not-measured-yet"])),
        (strings(&["new", "old", "stuck"]), strings(&[])),
    ];
    assert_eq!(seen, expected);
}

/// Without `hostPID` the driver may list no process at all.
#[test]
fn memory_of_hidden_processes_is_not_that_of_the_driver() {
    let mut stage = two_processes();
    stage.sample_with(|_, sample| sample.processes = Some(Vec::new()));
    stage.sample_with(|_, sample| sample.processes = Some(Vec::new()));
    let text = families::metrics(&stage.snapshot_with(false), &everything(), Format::Plain);
    assert_eq!(remainder(&text), parts([("unknown", 8192 + 1024 + 64)]));
    assert_eq!(present(&text, &PROCESSES), [""; 0]);
}
