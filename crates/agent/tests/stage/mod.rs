//! A node made of files: GPUs, processes and a `/proc` directory. Its pods are plain values.

#![allow(clippy::unwrap_used, reason = "test helpers may panic like tests")]

#[path = "../fixtures/mod.rs"]
mod fixtures;

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

use self::fixtures::container_id;
pub(crate) use self::fixtures::uuid;

/// Time of the first sample in microseconds since 1970.
pub(crate) const START: u64 = 1_800_000_000_000_000;

/// Time between two samples in microseconds.
pub(crate) const STEP: u64 = 2_000_000;

/// Returns the hold of a share of a GPU.
pub(crate) fn share(gpu: u8, compute_percent: u32, mib: u64) -> (u8, Hold) {
    (gpu, Hold::Share { compute_percent: Percent(compute_percent), memory: MiB(mib) })
}

pub(crate) struct Stage {
    directory: tempfile::TempDir,
    gpus: Simulated,
    caches: Vec<ProcessCache>,
    lines: Vec<String>,
    pub(crate) view: View,
    pub(crate) meter: Meter,
    pub(crate) now: u64,
    since: Vec<u64>,
}

impl Stage {
    pub(crate) fn new(count: u8) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut host = fixtures::a100s(count);
        for (index, gpu) in host["gpus"].as_array_mut().unwrap().iter_mut().enumerate() {
            gpu["numa"] = (index / 4).into();
        }
        fs::write(directory.path().join("gpus"), host.to_string()).unwrap();
        let gpus = Simulated::new(directory.path().join("gpus"));
        let found = gpus.discover().unwrap();
        let cache = |_| ProcessCache::new(Processes::at(directory.path().join("proc")));
        let view = View {
            pods_known: true,
            listed: true,
            pci: found.pci.clone(),
            driver: Some("580.159.04".into()),
            ..View::default()
        };
        Self {
            caches: (0..count).map(cache).collect(),
            directory,
            gpus,
            lines: Vec::new(),
            view,
            meter: Meter::default(),
            now: START,
            since: vec![0; usize::from(count)],
        }
    }

    /// Adds a pod with one container and its grants. The UID and the container ID follow from
    /// `number`.
    pub(crate) fn pod(&mut self, number: u32, namespace: &str, name: &str, gpus: &[(u8, Hold)]) {
        let uid = PodUid(pod_uid(number));
        self.view.pods.push(PodView {
            uid: uid.clone(),
            namespace: namespace.into(),
            name: name.into(),
            kubelet_uid: None,
            containers: vec![(container_id(number), "main".into())],
            ended: false,
        });
        if !gpus.is_empty() {
            self.view.containers.push(ContainerView {
                memory_limits: Vec::new(),
                uid,
                namespace: namespace.into(),
                pod: name.into(),
                cluster: String::new(),
                user: "ann".into(),
                container: "main".into(),
                dialect: Some(Dialect::Vcuda),
                gpus: gpus.to_vec(),
                listed: true,
            });
        }
    }

    /// Adds a process on a GPU: `memory` in MiB, `busy` in percent.
    pub(crate) fn process(&mut self, pid: u32, gpu: u8, memory: Option<u64>, busy: u32) {
        let mut line = json!({ "pid": pid, "gpu": gpu, "busyPercent": busy });
        if let Some(memory) = memory {
            line["memoryMiB"] = memory.into();
        }
        self.lines.push(line.to_string());
    }

    /// Writes the `/proc` entry of a process.
    pub(crate) fn proc_entry(&self, pid: u32, command: &str, cgroup: &str) {
        let own = self.directory.path().join(format!("proc/{pid}"));
        fs::create_dir_all(&own).unwrap();
        let numbers = "S 1 7 7 0 -1 4194560 1 0 0 0 3 4 0 0 20 0 1 0";
        fs::write(own.join("stat"), format!("{pid} ({command}) {numbers} {} 1000 50\n", pid * 10)).unwrap();
        fs::write(own.join("comm"), format!("{command}\n")).unwrap();
        fs::write(own.join("cgroup"), cgroup).unwrap();
    }

    /// Writes the `/proc` entry of a process in a pod's container.
    pub(crate) fn in_pod(&self, pid: u32, command: &str, number: u32) {
        let uid = pod_uid(number).replace('-', "_");
        let slice =
            format!("/kubepods.slice/kubepods-pod{uid}.slice/cri-containerd-{}.scope", container_id(number));
        self.proc_entry(pid, command, &format!("0::{slice}\n"));
    }

    /// Adds all grants to the ledger of the view.
    pub(crate) fn fill_ledger(&mut self) {
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
                holds: held.gpus.iter().map(|(gpu, hold)| (GpuIndex(*gpu), *hold)).collect(),
            });
        }
        for (pod, containers) in pods {
            let (cpu, memory) = (MilliCpu::ZERO, MiB::ZERO);
            ledger.observe(PodGrant { pod, node: node.name.clone(), cpu, memory, containers });
        }
        self.view.overbooked = ledger.overbooked().into_values().flatten().map(|gpu| gpu.0).collect();
        self.view.node = ledger.node(&node.name).cloned();
    }

    /// Samples all GPUs and advances the time by a step.
    pub(crate) fn sample(&mut self) {
        self.sample_with(|_, _| {});
    }

    /// Samples all GPUs with values that a simulated GPU cannot have.
    pub(crate) fn sample_with(&mut self, change: impl Fn(usize, &mut GpuSample)) {
        fs::write(self.directory.path().join("gpus.processes"), self.lines.join("\n")).unwrap();
        self.meter.set_pods(&self.view.pods);
        let found = Arc::new(self.gpus.discover().unwrap());
        for (place, gpu) in found.gpus.iter().enumerate() {
            let interval = SampleInterval { since: self.since[place], now: self.now };
            let mut observation =
                sample_gpu(&self.gpus, &gpu.uuid, Some(&mut self.caches[place]), interval).unwrap();
            self.since[place] = observation.sample.work.to;
            change(place, &mut observation.sample);
            observation.duration_seconds = 0.25;
            self.meter.observe(&gpu.uuid, observation);
        }
        self.now += STEP;
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        self.snapshot_with(true)
    }

    /// Returns the state of a node whose agent sees the processes of the host, or does not.
    pub(crate) fn snapshot_with(&self, processes: bool) -> Snapshot {
        let snapshot = Snapshot::new(&self.view, &self.meter, 0.0, processes);
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

pub(crate) fn pod_uid(number: u32) -> String {
    format!("{number:08x}-d0e2-4706-8787-57d52c03ddf2")
}

/// Returns a node with eight GPUs, 100 pods and 200 processes.
#[allow(dead_code, reason = "not every user of this module needs it")]
pub(crate) fn crowded() -> Stage {
    let mut stage = Stage::new(8);
    for number in 0..100 {
        let gpu = u8::try_from(number % 8).unwrap();
        stage.pod(number, &format!("team-{}", number % 7), &format!("job-{number}"), &[share(gpu, 7, 4096)]);
        for pid in [1000 + number, 2000 + number] {
            stage.process(pid, gpu, Some(1000 + u64::from(number)), number % 5);
            stage.in_pod(pid, "python3", number);
        }
    }
    stage.fill_ledger();
    stage.sample();
    stage.sample();
    stage
}
