//! GPUs that exist only in a file.

mod load;

use std::{
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, SystemTime},
};

use tessera_core::{
    gpu::{Gpu, GpuUuid, Health},
    topology::Topology,
    units::{GpuIndex, MiB},
};
use tessera_wire::{foreign::smi_matrix, tessera::inventory};

use super::{
    DiscoveredGpus, GpuSample, Gpus, GpusError, Incident, IncidentKind, ProcessMemory, SampleInterval,
};

/// Memory and model of a GPU where the file is only a matrix of links.
const MEMORY: MiB = MiB(81_920);
const MODEL: &str = "NVIDIA A100-SXM4-80GB";

/// How often the file of events is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Looks without news before `None` is reported.
const LOOKS: u32 = 10;

/// GPUs described by a file: the JSON that `tessera inventory --json` prints (and the node annotation
/// `tessera.dev/inventory` holds), or a matrix as `nvidia-smi topo -m` prints it.
///
/// Lines appended to the file of the same name with `.events` behind it happen to the GPUs: `3 xid 79`, `3 ecc`, `3 lost`,
/// `3 back`. Lines of the file with `.processes` behind it run on the GPUs, for as long as they stand there:
/// `{"pid":123,"gpu":0,"memoryMiB":1024,"busyPercent":40}`.
#[derive(Clone, Debug)]
pub struct Simulated {
    file: PathBuf,
    seen: Arc<Mutex<Seen>>,
}

/// What is remembered between looks at the GPUs.
#[derive(Debug, Default)]
struct Seen {
    /// The description as it was when last read, so that it is not read again for each look.
    cards: Option<(SystemTime, Vec<Gpu>)>,
    meters: load::Meters,
}

impl Simulated {
    /// The GPUs described by `file`, read anew at every question.
    #[must_use]
    pub fn new(file: PathBuf) -> Self {
        Self { file, seen: Arc::default() }
    }

    fn beside(&self, ending: &str) -> PathBuf {
        let mut name = self.file.clone().into_os_string();
        name.push(ending);
        name.into()
    }

    fn events(&self) -> PathBuf {
        self.beside(".events")
    }

    /// The GPU of this name; the description is read again only if it has changed.
    fn card(&self, seen: &mut Seen, gpu: &GpuUuid) -> Result<Gpu, GpusError> {
        let changed = fs::metadata(&self.file).and_then(|file| file.modified()).ok();
        if seen.cards.as_ref().map(|(at, _)| *at) != changed || changed.is_none() {
            seen.cards = Some((changed.unwrap_or(SystemTime::UNIX_EPOCH), self.discover()?.gpus));
        }
        let card = seen.cards.iter().flat_map(|(_, cards)| cards).find(|card| card.uuid == *gpu);
        card.cloned().ok_or_else(|| GpusError::UnknownGpu(gpu.clone()))
    }

    /// Who runs on the GPUs.
    fn running(&self) -> Vec<load::Process> {
        load::parse(&fs::read_to_string(self.beside(".processes")).unwrap_or_default())
    }
}

impl Gpus for Simulated {
    fn discover(&self) -> Result<DiscoveredGpus, GpusError> {
        let bad = |reason: String| GpusError::Description { path: self.file.clone(), reason };
        let text = fs::read_to_string(&self.file).map_err(|error| bad(error.to_string()))?;
        let (gpus, topology) = if text.trim_start().starts_with('{') {
            let read = inventory::parse(&text).map_err(|error| bad(error.to_string()))?;
            (read.gpus, read.topology)
        } else {
            let matrix = smi_matrix::parse(&text).map_err(|error| bad(error.to_string()))?;
            (cards(&matrix.topology), matrix.topology)
        };
        if gpus.is_empty() {
            return Err(GpusError::NoGpu);
        }
        let pci =
            gpus.iter().map(|gpu| format!("00000000:{:02X}:00.0", u32::from(gpu.index.0) + 1)).collect();
        Ok(DiscoveredGpus { gpus, topology, pci, driver: None })
    }

    fn sample(&self, gpu: &GpuUuid, window: SampleInterval) -> Result<GpuSample, GpusError> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let card = self.card(&mut seen, gpu)?;
        Ok(load::sample(&card, &self.running(), window, &mut seen.meters))
    }

    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<ProcessMemory>, GpusError> {
        let card = self.card(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner), gpu)?;
        // With meters of its own: this look measures nothing.
        let look =
            load::sample(&card, &self.running(), SampleInterval::default(), &mut load::Meters::default());
        Ok(look.processes.unwrap_or_default())
    }

    fn watch(
        &self,
        report: &mut dyn FnMut(Option<Incident>) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, GpusError> {
        let found = self.discover()?;
        let mut seen = 0;
        loop {
            for _ in 0..LOOKS {
                let text = fs::read_to_string(self.events()).unwrap_or_default();
                let lines: Vec<&str> = text.lines().collect();
                for line in lines.iter().skip(seen) {
                    if let Some(incident) = incident(line, &found.gpus)
                        && report(Some(incident)).is_break()
                    {
                        return Ok(ControlFlow::Break(()));
                    }
                }
                seen = lines.len();
                thread::sleep(LOOK_EVERY);
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

/// GPUs of one model for a matrix of links, with names that look like real ones and stay the same.
fn cards(topology: &Topology) -> Vec<Gpu> {
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

/// `3 xid 79`; a line that is none happens to nobody.
fn incident(line: &str, gpus: &[Gpu]) -> Option<Incident> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (card, kind) = match words.as_slice() {
        [card, "xid", number] => (card, IncidentKind::Xid(number.parse().ok()?)),
        [card, "ecc"] => (card, IncidentKind::DoubleBitEcc),
        [card, "lost"] => (card, IncidentKind::Lost),
        [card, "back"] => (card, IncidentKind::Back),
        _ => return None,
    };
    let gpu = gpus.get(card.parse::<usize>().ok()?)?;
    Some(Incident { gpu: Some(gpu.uuid.clone()), kind })
}

/// Writes a description of `gpus` GPUs that `file` can be opened with: for tests.
pub fn describe(file: &Path, gpus: Vec<Gpu>, topology: Topology) -> std::io::Result<()> {
    let memory_unit = tessera_wire::foreign::dialect::MemoryUnit::default();
    fs::write(file, inventory::print(&inventory::Inventory { gpus, topology, memory_unit }))
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
    fn a_matrix_is_enough() {
        let (_directory, gpus) = simulated(MATRIX);
        let found = gpus.discover().unwrap();
        assert_eq!(found.gpus.len(), 2);
        assert_eq!(found.gpus[1].uuid.0.as_ref(), "GPU-5e55e4a1-0000-4000-8000-000000000001");
        assert_eq!((found.gpus[1].memory, found.gpus[1].numa), (MEMORY, Some(1)));
        assert_eq!(found.topology.link(GpuIndex(0), GpuIndex(1)).nvlinks, 12);
    }

    #[test]
    fn what_is_found_can_be_written_and_found_again() {
        let (_directory, gpus) = simulated(MATRIX);
        let mut found = gpus.discover().unwrap();
        found.gpus[0].memory = MiB(40_960);
        describe(&gpus.file, found.gpus.clone(), found.topology.clone()).unwrap();
        assert_eq!(gpus.discover().unwrap(), found);
    }

    #[test]
    fn a_file_that_describes_nothing_says_so() {
        let (_directory, gpus) = simulated("hello");
        assert!(gpus.discover().unwrap_err().to_string().starts_with("cannot read the description"));
        let missing = Simulated::new("/nowhere/gpus".into());
        assert!(missing.discover().is_err());
    }

    #[test]
    fn lines_of_events_happen() {
        let (_directory, gpus) = simulated(MATRIX);
        fs::write(gpus.events(), "1 xid 79\nnonsense\n0 lost\n7 lost\n0 back\n").unwrap();
        let mut seen = Vec::new();
        let ended = gpus.watch(&mut |incident| {
            seen.extend(incident.map(|incident| incident.kind));
            if seen.len() == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert!(ended.unwrap().is_break());
        assert_eq!(seen, [IncidentKind::Xid(79), IncidentKind::Lost, IncidentKind::Back]);
    }
}
