//! Simulated GPUs, described by a file.

mod load;

use std::{
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, SystemTime},
};

use serde::Deserialize;
use tessera_core::{
    gpu::{Gpu, GpuUuid, Health},
    topology::Topology,
    units::{GpuIndex, MiB},
};
use tessera_wire::{foreign::smi_matrix, tessera::inventory};

use super::{
    BadDescription, DiscoveredGpus, GpuInstance, GpuSample, Gpus, GpusError, Incident, IncidentKind,
    ProcessMemory, RemappedRows, SampleInterval, Sensors,
};

/// Memory of a GPU if the file is only a matrix of links.
const MEMORY: MiB = MiB(81_920);
/// Model of a GPU if the file is only a matrix of links.
const MODEL: &str = "NVIDIA A100-SXM4-80GB";

/// Time between two polls of the file of events.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Polls without an event before `None` is reported.
const POLLS_PER_REPORT: u32 = 10;

/// GPUs described by a file: the JSON that `tessera inventory --json` prints (and the node
/// annotation `tessera.dev/inventory` holds), or a matrix as `nvidia-smi topo -m` prints it.
///
/// Lines appended to `FILE.events` are incidents of the GPUs: `3 xid 79`, `3 ecc`, `3 lost`, `3
/// back`. A GPU with `3 ecc` awaits a reset for its memory, and `3 hot` slows it down until `3 cool`.
/// Lines of `FILE.processes` are processes on the GPUs for as long as they are in the file:
/// `{"pid":123,"gpu":0,"memoryMiB":1024,"busyPercent":40}`. Lines of `FILE.instances` put GPUs into MIG mode:
/// `{"gpu":0,"uuid":"MIG-4e0c","profile":"1g.10gb","memoryMiB":9728,"gpuInstance":7,"computeInstance":0}`.
#[derive(Clone, Debug)]
pub struct Simulated {
    file: PathBuf,
    state: Arc<Mutex<SimulatedState>>,
}

/// One line of the file of MIG instances.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct InstanceLine {
    gpu: u8,
    uuid: String,
    profile: String,
    #[serde(rename = "memoryMiB")]
    memory_mib: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

impl InstanceLine {
    /// Returns the instance, or `None` if its GPU does not exist.
    fn of(self, gpus: &[Gpu]) -> Option<GpuInstance> {
        let gpu = gpus.get(usize::from(self.gpu))?;
        Some(GpuInstance {
            gpu: gpu.index,
            gpu_uuid: gpu.uuid.clone(),
            uuid: self.uuid.as_str().into(),
            profile: self.profile,
            memory: MiB(self.memory_mib),
            gpu_instance: self.gpu_instance,
            compute_instance: self.compute_instance,
            device_nodes: Vec::new(),
        })
    }
}

/// State kept between two samples.
#[derive(Debug, Default)]
struct SimulatedState {
    /// GPUs of the description and its modification time, so that it is not parsed for each sample.
    gpus: Option<(SystemTime, Vec<Gpu>)>,
    meters: load::Meters,
}

impl Simulated {
    /// Returns the GPUs described by `file`, which is read when it has changed.
    #[must_use]
    pub fn new(file: PathBuf) -> Self {
        Self { file, state: Arc::default() }
    }

    fn beside(&self, ending: &str) -> PathBuf {
        let mut name = self.file.clone().into_os_string();
        name.push(ending);
        name.into()
    }

    fn events(&self) -> PathBuf {
        self.beside(".events")
    }

    /// Returns the GPU with this UUID. The description is read again only if it has changed.
    fn gpu(&self, state: &mut SimulatedState, uuid: &GpuUuid) -> Result<Gpu, GpusError> {
        let changed = fs::metadata(&self.file).and_then(|file| file.modified()).ok();
        if state.gpus.as_ref().map(|(at, _)| *at) != changed || changed.is_none() {
            let DiscoveredGpus { mut gpus, instances, .. } = self.discover()?;
            // An instance that is offered as a GPU is sampled like one.
            let of_instances = instances.iter().filter_map(|instance| {
                let gpu = gpus.get(instance.gpu.position())?;
                Some(instance.as_gpu(instance.gpu, gpu))
            });
            gpus.extend(of_instances.collect::<Vec<_>>());
            state.gpus = Some((changed.unwrap_or(SystemTime::UNIX_EPOCH), gpus));
        }
        let gpu = state.gpus.iter().flat_map(|(_, gpus)| gpus).find(|gpu| gpu.uuid == *uuid);
        gpu.cloned().ok_or_else(|| GpusError::UnknownGpu(uuid.clone()))
    }

    /// Adds to a sample what the events of the GPU have left behind.
    fn add_troubles(&self, gpu: GpuIndex, sensors: &mut Sensors) {
        /// NVML's bit of clocks that the hardware reduces because of heat.
        const HARDWARE_THERMAL: u64 = 0x40;
        let text = fs::read_to_string(self.events()).unwrap_or_default();
        let of_gpu = text.lines().filter_map(|line| {
            let (index, event) = line.trim().split_once(' ')?;
            (index == gpu.to_string()).then_some(event.trim())
        });
        for event in of_gpu {
            let clocks = sensors.clock_events.unwrap_or(0);
            match event {
                "ecc" => {
                    sensors.uncorrected_errors = sensors.uncorrected_errors.map(|count| count + 1);
                    sensors.remapped_rows = Some(RemappedRows { pending: true, ..RemappedRows::default() });
                }
                "hot" => sensors.clock_events = Some(clocks | HARDWARE_THERMAL),
                "cool" => sensors.clock_events = Some(clocks & !HARDWARE_THERMAL),
                _ => {}
            }
        }
    }

    /// Returns the processes on all GPUs.
    fn running(&self) -> Vec<load::Process> {
        load::parse(&fs::read_to_string(self.beside(".processes")).unwrap_or_default())
    }
}

impl Gpus for Simulated {
    fn discover(&self) -> Result<DiscoveredGpus, GpusError> {
        let (mut gpus, topology) = read_description(&self.file)
            .map_err(|reason| GpusError::Description { path: self.file.clone(), reason })?;
        if gpus.is_empty() {
            return Err(GpusError::NoGpu);
        }
        let pci =
            gpus.iter().map(|gpu| format!("00000000:{:02X}:00.0", u32::from(gpu.index.0) + 1)).collect();
        let lines = fs::read_to_string(self.beside(".instances")).unwrap_or_default();
        let instances: Vec<GpuInstance> = lines
            .lines()
            .filter_map(|line| serde_json::from_str::<InstanceLine>(line).ok()?.of(&gpus))
            .collect();
        let has_instances = |gpu: &&mut Gpu| instances.iter().any(|part| part.gpu == gpu.index);
        for gpu in gpus.iter_mut().filter(has_instances).filter(|gpu| gpu.health != Health::AwaitingReset) {
            gpu.health = Health::InMigMode;
        }
        Ok(DiscoveredGpus { gpus, topology, instances, pci, driver: None })
    }

    fn sample(&self, gpu: &GpuUuid, interval: SampleInterval) -> Result<GpuSample, GpusError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let gpu = self.gpu(&mut state, gpu)?;
        let mut sample = load::sample(&gpu, &self.running(), interval, &mut state.meters);
        self.add_troubles(gpu.index, &mut sample.sensors);
        Ok(sample)
    }

    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<ProcessMemory>, GpusError> {
        let gpu = self.gpu(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner), gpu)?;
        // This sample uses its own meters, so that it does not change the measured energy.
        let sample =
            load::sample(&gpu, &self.running(), SampleInterval::default(), &mut load::Meters::default());
        Ok(sample.processes.unwrap_or_default())
    }

    fn watch(
        &self,
        report: &mut dyn FnMut(Option<Incident>) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, GpusError> {
        let found = self.discover()?;
        let mut handled = 0;
        loop {
            for _ in 0..POLLS_PER_REPORT {
                let text = fs::read_to_string(self.events()).unwrap_or_default();
                let lines: Vec<&str> = text.lines().collect();
                for line in lines.iter().skip(handled) {
                    if let Some(incident) = incident(line, &found.gpus)
                        && report(Some(incident)).is_break()
                    {
                        return Ok(ControlFlow::Break(()));
                    }
                }
                handled = lines.len();
                thread::sleep(POLL_INTERVAL);
            }
            if report(None).is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
    }

    fn have_device_nodes(&self) -> bool {
        false
    }
}

/// Reads the GPUs and their links from a description.
fn read_description(file: &Path) -> Result<(Vec<Gpu>, Topology), BadDescription> {
    let text = fs::read_to_string(file)?;
    if text.trim_start().starts_with('{') {
        let read = inventory::parse(&text)?;
        return Ok((read.gpus, read.topology));
    }
    let matrix = smi_matrix::parse(&text)?;
    Ok((default_gpus(&matrix.topology), matrix.topology))
}

/// Returns GPUs of one model for a matrix of links, with fixed UUIDs that look like real ones.
fn default_gpus(topology: &Topology) -> Vec<Gpu> {
    let gpu = |index: GpuIndex| Gpu {
        index,
        uuid: format!("GPU-5e55e4a{:x}-0000-4000-8000-{:012x}", index.0 % 16, index.0).as_str().into(),
        minor: u32::from(index.0),
        model: MODEL.into(),
        memory: MEMORY,
        numa: topology.numa(index),
        health: Health::Healthy,
    };
    topology.gpus().iter().map(gpu).collect()
}

/// Parses a line such as `3 xid 79`. Returns `None` for any other line.
fn incident(line: &str, gpus: &[Gpu]) -> Option<Incident> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (index, kind) = match words.as_slice() {
        [index, "xid", number] => (index, IncidentKind::Xid(number.parse().ok()?)),
        [index, "ecc"] => (index, IncidentKind::DoubleBitEcc),
        [index, "lost"] => (index, IncidentKind::Lost),
        [index, "back"] => (index, IncidentKind::Back),
        _ => return None,
    };
    let gpu = gpus.get(index.parse::<usize>().ok()?)?;
    Some(Incident { gpu: Some(gpu.uuid.clone()), kind })
}

/// Writes a description of GPUs to `file`, for tests and demos.
pub fn describe(file: &Path, gpus: Vec<Gpu>, topology: Topology) -> std::io::Result<()> {
    let memory_unit = tessera_wire::foreign::dialect::MemoryUnit::default();
    let inventory = inventory::Inventory {
        gpus,
        topology,
        memory_unit,
        nvidia_slots: None,
        whole_gpus_only: false,
        withheld: Vec::new(),
    };
    fs::write(file, inventory::print(&inventory))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MATRIX: &str = "\
\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV12\t0-7\t0
GPU1\tNV12\t X \t8-15\t1
";

    fn simulated(text: &str) -> (tempfile::TempDir, Simulated) {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("gpus");
        fs::write(&file, text).unwrap();
        (directory, Simulated::new(file))
    }

    #[test]
    fn discovers_gpus_from_a_matrix() {
        let (_directory, gpus) = simulated(MATRIX);
        let found = gpus.discover().unwrap();
        assert_eq!(found.gpus.len(), 2);
        assert_eq!(found.gpus[1].uuid.0.as_ref(), "GPU-5e55e4a1-0000-4000-8000-000000000001");
        assert_eq!((found.gpus[1].memory, found.gpus[1].numa), (MEMORY, Some(1)));
        assert_eq!(found.topology.link(GpuIndex(0), GpuIndex(1)).nvlinks, 12);
    }

    #[test]
    fn describes_gpus_so_that_they_are_discovered_again() {
        let (_directory, gpus) = simulated(MATRIX);
        let mut found = gpus.discover().unwrap();
        found.gpus[0].memory = MiB(40_960);
        describe(&gpus.file, found.gpus.clone(), found.topology.clone()).unwrap();
        assert_eq!(gpus.discover().unwrap(), found);
    }

    #[test]
    fn returns_an_error_for_a_file_without_a_description() {
        let (_directory, gpus) = simulated("hello");
        assert!(gpus.discover().unwrap_err().to_string().starts_with("cannot read the description"));
        let missing = Simulated::new("/nowhere/gpus".into());
        assert!(missing.discover().is_err());
    }

    #[test]
    fn reports_lines_of_the_events_file() {
        let (_directory, gpus) = simulated(MATRIX);
        fs::write(gpus.events(), "1 xid 79\nnonsense\n0 lost\n7 lost\n0 back\n").unwrap();
        let mut incidents = Vec::new();
        let ended = gpus.watch(&mut |incident| {
            incidents.extend(incident.map(|incident| incident.kind));
            if incidents.len() == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert!(ended.unwrap().is_break());
        assert_eq!(incidents, [IncidentKind::Xid(79), IncidentKind::Lost, IncidentKind::Back]);
    }
}
