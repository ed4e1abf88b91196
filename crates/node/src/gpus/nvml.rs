//! GPUs accessed through NVML. The library is loaded on first use. Any of its functions may be
//! missing in an old driver, which then reports less without an error.

mod profile;
mod raw;
mod sample;

use std::{
    collections::BTreeMap,
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::{Mutex, OnceLock, PoisonError},
};

use nvml_wrapper::{
    Device, Nvml as Library, bitmasks::event::EventTypes, enum_wrappers::device::TopologyLevel,
    enums::event::XidError, error::NvmlError, structs::device::FieldId,
};
use tessera_core::{
    gpu::{Gpu, GpuUuid, Health},
    gpu_set::GpuSet,
    topology::{Link, PcieLevel, Topology},
    units::{GpuIndex, MiB},
};

use self::{raw::Raw, sample::Samples};
use super::{
    DiscoveredGpus, GpuInstance, GpuPower, GpuSample, Gpus, GpusError, Incident, IncidentKind, ProcessMemory,
    SampleInterval, instance::device_nodes,
};

/// Timeout of one wait for events, as in the original device plugins.
const WAIT_MILLISECONDS: u32 = 5000;

/// Largest number of NVLinks of a GPU.
const MAX_LINKS: u32 = 18;

/// Directory in which the driver describes the device nodes of MIG instances.
const CAPABILITIES: &str = "/proc/driver/nvidia/capabilities";

/// Events that make a GPU unhealthy.
const EVENTS: EventTypes = EventTypes::CRITICAL_XID_ERROR.union(EventTypes::DOUBLE_BIT_ECC_ERROR);

/// GPUs of the NVIDIA driver.
#[derive(Debug, Default)]
pub struct Nvml {
    library: Mutex<Option<&'static Library>>,
    /// Directory in which the library is searched if the loader does not find it.
    directory: Option<PathBuf>,
    raw: OnceLock<Option<Raw>>,
    samples: Samples,
}

impl Nvml {
    /// Returns the GPUs of the driver whose library is in `directory`, if the loader does not find it.
    #[must_use]
    pub fn searched_in(directory: Option<PathBuf>) -> Self {
        Self { directory, ..Self::default() }
    }

    /// Loads the library, or returns the loaded one. A failure is not cached, because a driver may
    /// be installed later. The library is never unloaded, because threads of this process may wait
    /// inside it.
    fn library(&self) -> Result<&'static Library, GpusError> {
        let mut library = self.library.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(loaded) = *library {
            return Ok(loaded);
        }
        let load = || match (Library::init(), &self.directory) {
            (Err(NvmlError::LibloadingError(_)), Some(directory)) => {
                Library::builder().lib_path(directory.join("libnvidia-ml.so.1").as_os_str()).init()
            }
            (loaded, _) => loaded,
        };
        let loaded = load().map_err(|error| match error {
            NvmlError::LibloadingError(why) => GpusError::NoDriver(why.to_string()),
            other => GpusError::NoDriver(other.to_string()),
        })?;
        Ok(*library.insert(Box::leak(Box::new(loaded))))
    }

    /// Returns the MIG instances of all GPUs in MIG mode.
    fn instances(&self, gpus: &[Gpu], devices: &[Result<Device<'static>, NvmlError>]) -> Vec<GpuInstance> {
        let raw = self.raw.get_or_init(Raw::load).as_ref();
        let of = |(gpu, device): (&Gpu, &Result<Device<'static>, NvmlError>)| {
            let in_mig_mode = device.as_ref().ok().filter(|device| is_in_mig_mode(device));
            let parts = in_mig_mode.map(sample::mig_devices).into_iter().flatten();
            parts.filter_map(|part| instance_of(gpu, &part, raw?)).collect::<Vec<_>>()
        };
        gpus.iter().zip(devices).flat_map(of).collect()
    }

    fn devices(&self) -> Result<Vec<Result<Device<'static>, NvmlError>>, GpusError> {
        let library = self.library()?;
        let count = library.device_count().map_err(failed("the number of GPUs"))?;
        let limit = u32::try_from(GpuSet::CAPACITY).unwrap_or(u32::MAX);
        Ok((0..count.min(limit)).map(|index| library.device_by_index(index)).collect())
    }
}

impl Gpus for Nvml {
    fn discover(&self) -> Result<DiscoveredGpus, GpusError> {
        let devices = self.devices()?;
        if devices.is_empty() {
            return Err(GpusError::NoGpu);
        }
        let indexes = (0u8..).map(GpuIndex);
        // A lost GPU must not hide the others.
        let pci: Vec<String> =
            devices.iter().map(|device| device.as_ref().map(bus_id).unwrap_or_default()).collect();
        let gpus: Vec<Gpu> = indexes
            .zip(&devices)
            .zip(&pci)
            .map(|((index, device), pci)| {
                let gpu = device.as_ref().ok().and_then(|device| gpu(index, device, pci).ok());
                gpu.unwrap_or_else(|| lost(index))
            })
            .collect();
        let links = links(self.library()?, &devices, &pci);
        let topology =
            Topology::from_pairs(gpus.len(), |a, b| links.get(&(a, b)).copied().unwrap_or_default());
        let numa: Vec<Option<u16>> = gpus.iter().map(|gpu| gpu.numa).collect();
        let driver = self.library()?.sys_driver_version().ok();
        let instances = self.instances(&gpus, &devices);
        Ok(DiscoveredGpus { gpus, topology: topology.with_numa(&numa), instances, pci, driver })
    }

    fn sample(&self, gpu: &GpuUuid, interval: SampleInterval) -> Result<GpuSample, GpusError> {
        let library = self.library()?;
        self.samples.take(library, self.raw.get_or_init(Raw::load).as_ref(), gpu, interval)
    }

    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<ProcessMemory>, GpusError> {
        sample::processes_on(self.library()?, self.raw.get_or_init(Raw::load).as_ref(), gpu)
    }

    fn power(&self, gpu: &GpuUuid) -> Option<GpuPower> {
        sample::power_of(self.library().ok()?, gpu)
    }

    fn watch(
        &self,
        report: &mut dyn FnMut(Option<Incident>) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, GpusError> {
        let library = self.library()?;
        let mut set = library.create_event_set().map_err(failed("events"))?;
        let mut watched = 0;
        for device in self.devices()?.into_iter().flatten() {
            let wanted = device.supported_event_types().unwrap_or_else(|_| EventTypes::empty()) & EVENTS;
            if wanted.is_empty() {
                tracing::warn!(
                    gpu = device.uuid().unwrap_or_default(),
                    "the driver cannot report errors of this GPU; its health is not watched"
                );
                continue;
            }
            set = device.register_events(wanted, set).map_err(|error| failed("events")(error.error))?;
            watched += 1;
        }
        tracing::info!(gpus = watched, "watching GPUs for errors");
        loop {
            let incident = match set.wait(WAIT_MILLISECONDS) {
                Ok(event) => {
                    let gpu = event.device.uuid().ok().map(|uuid| uuid.as_str().into());
                    let kind = match event.event_data {
                        Some(XidError::Value(number)) => IncidentKind::Xid(number),
                        Some(XidError::Unknown) => IncidentKind::Xid(999),
                        None => IncidentKind::DoubleBitEcc,
                    };
                    Some(Incident { gpu, kind })
                }
                Err(NvmlError::Timeout) => None,
                // The next discovery shows which GPU was lost.
                Err(NvmlError::GpuLost) => return Ok(ControlFlow::Continue(())),
                Err(error) => return Err(failed("events")(error)),
            };
            if report(incident).is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
    }

    fn have_device_nodes(&self) -> bool {
        true
    }
}

fn failed(what: &'static str) -> impl Fn(NvmlError) -> GpusError {
    move |error| GpusError::Driver { what, reason: error.to_string() }
}

fn gpu(index: GpuIndex, device: &Device<'static>, pci: &str) -> Result<Gpu, NvmlError> {
    Ok(Gpu {
        index,
        uuid: device.uuid()?.as_str().into(),
        minor: device.minor_number().unwrap_or_else(|_| u32::from(index.0)),
        model: device.name()?.as_str().into(),
        memory: mib(device.memory_info()?.total),
        numa: numa(device, pci),
        health: health(device),
    })
}

fn is_in_mig_mode(device: &Device<'_>) -> bool {
    device.mig_mode().is_ok_and(|mode| mode.current == 1)
}

/// Returns whether a GPU that answers can be granted. A pending reset concerns the instances of a GPU in MIG mode too.
fn health(device: &Device<'static>) -> Health {
    match (is_in_mig_mode(device), awaits_reset(device)) {
        (false, false) => Health::Healthy,
        (false, true) => Health::AwaitingReset,
        (true, true) if sample::mig_devices(device).next().is_some() => Health::AwaitingReset,
        // Without an instance nothing of the GPU is offered.
        (true, _) => Health::InMigMode,
    }
}

/// Returns whether a reset must take memory of the GPU out of use.
fn awaits_reset(device: &Device<'_>) -> bool {
    let fields = device.field_values_for(&[FieldId(sample::REMAPPING_PENDING)]).unwrap_or_default();
    let pending = fields.into_iter().flatten().filter_map(|field| sample::whole(field.value.ok()?));
    pending.max() > Some(0) || device.are_pages_pending_retired().unwrap_or(false)
}

/// Returns a MIG instance of a GPU, or `None` if the driver does not describe it.
fn instance_of(gpu: &Gpu, part: &Device<'_>, raw: &Raw) -> Option<GpuInstance> {
    let (gpu_instance, compute_instance) = raw.instances(part);
    let (gpu_instance, compute_instance) = (gpu_instance?, compute_instance?);
    Some(GpuInstance {
        gpu: gpu.index,
        gpu_uuid: gpu.uuid.clone(),
        uuid: part.uuid().ok()?.as_str().into(),
        profile: part.name().ok().as_deref().and_then(sample::mig_profile)?,
        memory: mib(part.memory_info().ok()?.total),
        gpu_instance,
        compute_instance,
        device_nodes: device_nodes(Path::new(CAPABILITIES), gpu.minor, gpu_instance, compute_instance),
    })
}

/// Returns a placeholder for a GPU that does not answer, so that the others keep their index.
fn lost(index: GpuIndex) -> Gpu {
    Gpu {
        index,
        uuid: format!("lost-{index}").as_str().into(),
        minor: u32::from(index.0),
        model: "unknown".into(),
        memory: MiB::ZERO,
        numa: None,
        health: Health::Unhealthy,
    }
}

fn mib(bytes: u64) -> MiB {
    MiB(bytes >> 20)
}

/// Returns the PCI address in the driver's form: `00000000:3B:00.0`.
fn bus_id(device: &Device<'_>) -> String {
    device.pci_info().map(|info| info.bus_id).unwrap_or_default()
}

/// Returns the NUMA node nearest to the GPU, from the kernel or else from the driver. The kernel's
/// path has a PCI domain of four digits. The driver's "NUMA node of the device" is not used: it is
/// the node of the GPU's own memory on hosts where that is a NUMA node.
fn numa(device: &Device<'_>, pci: &str) -> Option<u16> {
    let address = pci.to_lowercase();
    let short = address.strip_prefix("0000").filter(|short| short.len() >= 12).unwrap_or(&address);
    let kernel = fs::read_to_string(format!("/sys/bus/pci/devices/{short}/numa_node")).unwrap_or_default();
    nearest(&kernel, &device.memory_affinity(NODE_WORDS, WITHIN_NODE).unwrap_or_default())
}

/// Size of the driver's NUMA mask in words of 64 nodes.
const NODE_WORDS: usize = 4;

/// NVML's scope for affinity by NUMA node, not by socket.
const WITHIN_NODE: u32 = 0;

/// Returns the NUMA node from the kernel's file or from the driver's mask, which has a bit for each
/// node. The kernel writes -1 if it does not know the node, as in many virtual machines.
fn nearest(kernel: &str, driver: &[std::ffi::c_ulong]) -> Option<u16> {
    kernel.trim().parse().ok().or_else(|| {
        let (word, bits) = driver.iter().enumerate().find(|(_, bits)| **bits != 0)?;
        u16::try_from(word * 64 + usize::try_from(bits.trailing_zeros()).ok()?).ok()
    })
}

/// Returns the PCIe and NVLink connections between all GPUs that answer.
fn links(
    library: &Library,
    devices: &[Result<Device<'_>, NvmlError>],
    pci: &[String],
) -> BTreeMap<(GpuIndex, GpuIndex), Link> {
    let ends: Vec<LinkEnds> = devices
        .iter()
        .map(|device| device.as_ref().map(|device| LinkEnds::of(device, pci)).unwrap_or_default())
        .collect();
    let mut links = BTreeMap::new();
    for (a, b) in GpuSet::first(devices.len()).pairs() {
        let (Some(Ok(first)), Ok(second)) = (devices.get(a.position()), library.device_by_index(b.0.into()))
        else {
            continue;
        };
        let level = first.topology_common_ancestor(second).ok().map(pcie_level);
        let nvlinks = ends[a.position()].to(b, &ends[b.position()]);
        links.insert((a, b), Link { pcie: level, nvlinks });
    }
    links
}

fn pcie_level(level: TopologyLevel) -> PcieLevel {
    match level {
        TopologyLevel::Internal => PcieLevel::SameBoard,
        TopologyLevel::Single => PcieLevel::SingleSwitch,
        TopologyLevel::Multiple => PcieLevel::MultiSwitch,
        TopologyLevel::HostBridge => PcieLevel::HostBridge,
        TopologyLevel::Node => PcieLevel::Node,
        TopologyLevel::System => PcieLevel::System,
    }
}

/// Remote ends of the NVLinks of a GPU.
#[derive(Debug, Default)]
struct LinkEnds {
    /// Number of direct links to other GPUs, by index.
    gpus: BTreeMap<usize, u8>,
    /// Number of links to a switch, which connects all GPUs with links to it. Any remote end that
    /// is not a GPU of this host counts as a switch.
    switched: u8,
}

impl LinkEnds {
    fn of(device: &Device<'_>, pci: &[String]) -> Self {
        let mut ends = Self::default();
        for number in 0..MAX_LINKS {
            let link = device.link_wrapper_for(number);
            if !link.is_active().unwrap_or(false) {
                continue;
            }
            let remote = link.remote_pci_info().map(|info| info.bus_id).unwrap_or_default();
            ends.add(&remote, pci);
        }
        ends
    }

    /// Adds a link to this PCI address. A lost GPU has an empty address, which matches no link.
    fn add(&mut self, remote: &str, pci: &[String]) {
        let is_remote = |own: &String| !own.is_empty() && own.eq_ignore_ascii_case(remote);
        match pci.iter().position(is_remote) {
            Some(gpu) => *self.gpus.entry(gpu).or_default() += 1,
            None => self.switched += 1,
        }
    }

    fn to(&self, other: GpuIndex, others: &Self) -> u8 {
        let direct = self.gpus.get(&other.position()).copied().unwrap_or_default();
        direct + self.switched.min(others.switched)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returns_an_error_without_a_driver_and_can_be_called_again() {
        let gpus = Nvml::default();
        if gpus.library().is_ok() {
            return; // This host has a driver.
        }
        for _ in 0..2 {
            let error = gpus.discover().unwrap_err().to_string();
            assert!(error.starts_with("no NVIDIA driver answers"), "{error}");
        }
        assert!(gpus.watch(&mut |_| ControlFlow::Break(())).is_err());
    }

    #[test]
    fn reads_the_numa_node_from_the_kernel_or_else_from_the_driver() {
        for (kernel, driver, node) in [
            ("1\n", vec![1], Some(1)),
            ("-1\n", vec![1, 0], Some(0)),
            ("", vec![0, 0b100], Some(66)),
            ("-1\n", vec![0, 0], None),
            ("", Vec::new(), None),
        ] {
            assert_eq!(nearest(kernel, &driver), node, "{kernel:?} {driver:?}");
        }
    }

    #[test]
    fn counts_switched_and_direct_links() {
        let switched = LinkEnds { gpus: BTreeMap::new(), switched: 18 };
        assert_eq!(switched.to(GpuIndex(5), &switched), 18);
        let wired = LinkEnds { gpus: [(1, 2)].into(), switched: 0 };
        assert_eq!((wired.to(GpuIndex(1), &wired), wired.to(GpuIndex(2), &wired)), (2, 0));
    }

    #[test]
    fn counts_links_with_an_unknown_end_as_switched() {
        let pci = ["00000000:3B:00.0", "", "00000000:D8:00.0"].map(str::to_owned);
        let mut ends = LinkEnds::default();
        for remote in ["00000000:d8:00.0", "", "00000000:5E:00.0"] {
            ends.add(remote, &pci);
        }
        assert_eq!((ends.gpus, ends.switched), ([(2, 1)].into(), 2));
    }
}
