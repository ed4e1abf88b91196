//! A node made of files: GPUs, processes and a `/proc` of our own, and pods that are only values.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail like tests")]

use std::{collections::BTreeMap, fs, path::Path, sync::Arc};

use serde_json::json;
use tessera_agent::{
    controller::{ContainerView, PodView, View},
    exporter::{Meter, Snapshot},
    shell::sample_gpu,
};
use tessera_core::{
    grant::{ContainerGrant, Hold, PodGrant},
    ledger::Ledger,
    node::Node,
    request::ContainerRole,
    units::{GpuIndex, MiB, MilliCpu, Percent, PodUid},
};
use tessera_node::{
    gpus::{GpuSample, Gpus as _, SampleInterval, Simulated},
    processes::{ProcessCache, Processes},
};
use tessera_wire::foreign::dialect::Dialect;

/// When the first look is taken, in microseconds since 1970.
pub(crate) const START: u64 = 1_800_000_000_000_000;

/// How long after it the next.
pub(crate) const STEP: u64 = 2_000_000;

/// What a container holds of a GPU.
pub(crate) fn share(card: u8, compute_percent: u32, mib: u64) -> (u8, Hold) {
    (card, Hold::Share { compute_percent: Percent(compute_percent), memory: MiB(mib) })
}

pub(crate) struct Stage {
    directory: tempfile::TempDir,
    gpus: Simulated,
    memory: Vec<ProcessCache>,
    lines: Vec<String>,
    pub(crate) view: View,
    pub(crate) meter: Meter,
    pub(crate) now: u64,
    since: Vec<u64>,
}

impl Stage {
    pub(crate) fn new(cards: u8) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let gpu = |index: u8| {
            json!({
                "uuid": uuid(index), "minor": index, "model": "NVIDIA A100-SXM4-80GB", "memoryMiB": 81_920, "numa": index / 4,
            })
        };
        let text =
            json!({ "memoryUnit": "GiB", "gpus": (0..cards).map(gpu).collect::<Vec<_>>(), "links": [] });
        fs::write(directory.path().join("gpus"), text.to_string()).unwrap();
        let gpus = Simulated::new(directory.path().join("gpus"));
        let found = gpus.discover().unwrap();
        let memory = |_| ProcessCache::new(Processes::at(directory.path().join("proc")));
        let view = View {
            pods_known: true,
            listed: true,
            pci: found.pci.clone(),
            driver: Some("580.159.04".into()),
            ..View::default()
        };
        Self {
            memory: (0..cards).map(memory).collect(),
            directory,
            gpus,
            lines: Vec::new(),
            view,
            meter: Meter::default(),
            now: START,
            since: vec![0; usize::from(cards)],
        }
    }

    /// A pod of one container, with its grants. Its UID and container ID follow from `number`.
    pub(crate) fn pod(&mut self, number: u32, namespace: &str, name: &str, cards: &[(u8, Hold)]) {
        let uid = PodUid(pod_uid(number));
        self.view.pods.push(PodView {
            uid: uid.clone(),
            namespace: namespace.into(),
            name: name.into(),
            kubelet_uid: None,
            containers: vec![(container_id(number), "main".into())],
            ended: false,
        });
        if !cards.is_empty() {
            self.view.containers.push(ContainerView {
                uid,
                namespace: namespace.into(),
                pod: name.into(),
                cluster: String::new(),
                container: "main".into(),
                dialect: Some(Dialect::Vcuda),
                gpus: cards.to_vec(),
                listed: true,
            });
        }
    }

    /// A process on a GPU: `memory` in MiB, `busy` in percent.
    pub(crate) fn process(&mut self, pid: u32, card: u8, memory: Option<u64>, busy: u32) {
        let mut line = json!({ "pid": pid, "gpu": card, "busyPercent": busy });
        if let Some(memory) = memory {
            line["memoryMiB"] = memory.into();
        }
        self.lines.push(line.to_string());
    }

    /// Who a process is, as the kernel shows it.
    pub(crate) fn who(&self, pid: u32, command: &str, cgroup: &str) {
        let own = self.directory.path().join(format!("proc/{pid}"));
        fs::create_dir_all(&own).unwrap();
        let numbers = "S 1 7 7 0 -1 4194560 1 0 0 0 3 4 0 0 20 0 1 0";
        fs::write(own.join("stat"), format!("{pid} ({command}) {numbers} {} 1000 50\n", pid * 10)).unwrap();
        fs::write(own.join("comm"), format!("{command}\n")).unwrap();
        fs::write(own.join("cgroup"), cgroup).unwrap();
    }

    /// A process of a pod's container.
    pub(crate) fn in_pod(&self, pid: u32, command: &str, number: u32) {
        let uid = pod_uid(number).replace('-', "_");
        let slice =
            format!("/kubepods.slice/kubepods-pod{uid}.slice/cri-containerd-{}.scope", container_id(number));
        self.who(pid, command, &format!("0::{slice}\n"));
    }

    /// All grants go into the books.
    pub(crate) fn book(&mut self) {
        let found = self.gpus.discover().unwrap();
        let name = "gpu-node-01".into();
        let node = Node::new(name, found.gpus, found.topology, MilliCpu(u64::MAX), MiB(u64::MAX)).unwrap();
        let mut ledger = Ledger::default();
        ledger.set_node(node.clone());
        let mut pods: BTreeMap<PodUid, Vec<ContainerGrant>> = BTreeMap::new();
        for held in &self.view.containers {
            pods.entry(held.uid.clone()).or_default().push(ContainerGrant {
                container: held.container.clone(),
                role: ContainerRole::Main,
                holds: held.gpus.iter().map(|(card, hold)| (GpuIndex(*card), *hold)).collect(),
            });
        }
        for (pod, containers) in pods {
            let (cpu, memory) = (MilliCpu::ZERO, MiB::ZERO);
            ledger.observe(PodGrant { pod, node: node.name.clone(), cpu, memory, containers });
        }
        self.view.overbooked = ledger.overbooked().into_values().flatten().map(|gpu| gpu.0).collect();
        self.view.node = ledger.node(&node.name).cloned();
    }

    /// Looks at all GPUs once more, a step later.
    pub(crate) fn look(&mut self) {
        self.look_at(|_, _| {});
    }

    /// The same, with something else seen than a simulated GPU can show.
    pub(crate) fn look_at(&mut self, change: impl Fn(usize, &mut GpuSample)) {
        fs::write(self.directory.path().join("gpus.processes"), self.lines.join("\n")).unwrap();
        self.meter.set_pods(&self.view.pods);
        let found = Arc::new(self.gpus.discover().unwrap());
        for (place, gpu) in found.gpus.iter().enumerate() {
            let window = SampleInterval { since: self.since[place], now: self.now };
            let mut seen = sample_gpu(&self.gpus, &gpu.uuid, Some(&mut self.memory[place]), window).unwrap();
            self.since[place] = seen.sample.work.to;
            change(place, &mut seen.sample);
            seen.duration_seconds = 0.25;
            self.meter.observe(&gpu.uuid, seen);
        }
        self.now += STEP;
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let snapshot = Snapshot::new(&self.view, &self.meter, 0.0, true);
        Snapshot { host_ip: "10.0.0.5".into(), ..snapshot }
    }

    #[allow(dead_code, reason = "not every user of this module needs it")]
    pub(crate) fn forget_process(&mut self, pid: u32) {
        self.lines.retain(|line| {
            !line.contains(&format!("\"pid\":{pid}}}")) && !line.contains(&format!("\"pid\":{pid},"))
        });
        let _gone = fs::remove_dir_all(self.path().join(format!("proc/{pid}")));
    }

    #[allow(dead_code, reason = "not every user of this module needs it")]
    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }
}

pub(crate) fn uuid(card: u8) -> String {
    format!("GPU-{card:08x}-0000-4000-8000-000000000000")
}

pub(crate) fn pod_uid(number: u32) -> String {
    format!("{number:08x}-d0e2-4706-8787-57d52c03ddf2")
}

pub(crate) fn container_id(number: u32) -> String {
    format!("{number:064x}")
}

/// Eight GPUs, a hundred pods, two hundred processes.
#[allow(dead_code, reason = "not every user of this module needs it")]
pub(crate) fn crowded() -> Stage {
    let mut stage = Stage::new(8);
    for number in 0..100 {
        let card = u8::try_from(number % 8).unwrap();
        stage.pod(number, &format!("team-{}", number % 7), &format!("job-{number}"), &[share(card, 7, 4096)]);
        for pid in [1000 + number, 2000 + number] {
            stage.process(pid, card, Some(1000 + u64::from(number)), number % 5);
            stage.in_pod(pid, "python3", number);
        }
    }
    stage.book();
    stage.look();
    stage.look();
    stage
}
