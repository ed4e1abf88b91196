//! The slice of a node: one device per GPU.

use std::collections::BTreeMap;

use tessera_core::gpu::{Gpu, Health};
use tessera_core::gpu_set::GpuSet;
use tessera_core::topology::Topology;
use tessera_core::units::{MiB, Percent};

use super::attributes::{self, GpuDetails};
use super::{CORES, DRIVER, MEMORY, device_name};
use crate::foreign::dra::{
    Attribute, Capacity, Device, DeviceTaint, Pool, RequestPolicy, RequestRange, SliceSpec,
};
use crate::foreign::objects::Amount;

/// Most devices that the API server accepts in a slice with taints.
const MAX_DEVICES: usize = 64;

// All GPUs of a node fit into one slice, so the pool of a node is one object that is updated atomically.
const _: () = assert!(GpuSet::CAPACITY <= MAX_DEVICES);

/// Longest name of an object in the API server, in bytes.
const MAX_NAME_BYTES: usize = 253;

/// Key of the taint of a GPU that gets no new claims. The value is the reason.
pub const TAINT_KEY: &str = "tessera.dev/unhealthy";

/// Taint effect that keeps new claims away and leaves running pods alone.
const NO_SCHEDULE: &str = "NoSchedule";

/// Whether claims can hold a part of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    /// A claim holds the amounts that it requests.
    #[default]
    Shares,
    /// A claim holds whole GPUs, because the API server does not keep the fields of shared devices.
    WholeGpus,
}

/// The GPUs of a node, as its agent offers them.
#[derive(Clone, Copy, Debug)]
pub struct NodeDevices<'a> {
    /// Name of the node, which is also the name of its pool.
    pub node: &'a str,
    /// GPUs by index, without gaps.
    pub gpus: &'a [Gpu],
    /// Links between the GPUs.
    pub topology: &'a Topology,
    /// Details of each GPU. GPUs beyond the list have none.
    pub details: &'a [GpuDetails],
    /// Version of the driver, if known.
    pub driver_version: Option<&'a str>,
    /// Whether claims can hold a part of a GPU.
    pub sharing: Sharing,
}

/// Returns the name of the slice of a node. A name that is too long for an object is cut, and a hash keeps it
/// apart from others.
#[must_use]
pub fn slice_name(node: &str) -> String {
    let name = format!("{node}-{DRIVER}");
    if name.len() <= MAX_NAME_BYTES {
        return name;
    }
    // FNV-1a, whose result is the same in every build.
    let hash = node.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let tail = format!("-{hash:016x}-{DRIVER}");
    let start: String = node.chars().filter(char::is_ascii).take(MAX_NAME_BYTES - tail.len()).collect();
    format!("{start}{tail}")
}

/// Returns the slice of a node in this generation of its pool.
///
/// GPUs that report no memory are left out: a claim could hold nothing of them.
#[must_use]
pub fn slice(node: &NodeDevices<'_>, generation: i64) -> SliceSpec {
    let domains = attributes::link_domains(node.topology);
    let none = GpuDetails::default();
    let device = |gpu: &Gpu| {
        let details = node.details.get(gpu.index.position()).unwrap_or(&none);
        let domain = domains.get(gpu.index.position()).copied().unwrap_or(gpu.index);
        device(gpu, attributes::of_gpu(gpu, details, node.driver_version, domain), node.sharing)
    };
    SliceSpec {
        driver: DRIVER.to_owned(),
        pool: Pool { name: node.node.to_owned(), generation, resource_slice_count: 1 },
        node_name: node.node.to_owned(),
        devices: node.gpus.iter().filter(|gpu| gpu.memory > MiB::ZERO).map(device).collect(),
    }
}

/// Returns whether claims can hold parts of the devices of a slice, as the API server has stored it. An empty
/// slice shows nothing, so it counts as shared.
#[must_use]
pub fn is_shared(stored: &SliceSpec) -> bool {
    let is_complete = |capacity: &Capacity| capacity.request_policy.is_some();
    stored
        .devices
        .iter()
        .all(|device| device.allow_multiple_allocations && device.capacity.values().all(is_complete))
}

fn device(gpu: &Gpu, attributes: BTreeMap<String, Attribute>, sharing: Sharing) -> Device {
    let amount = |text: String| Some(Amount(text));
    let range = |min: &str, max: String, step: &str| RequestPolicy {
        default_amount: amount(max.clone()),
        valid_range: Some(RequestRange {
            min: amount(min.to_owned()),
            max: amount(max),
            step: amount(step.to_owned()),
        }),
    };
    let capacity = |value: String, min: &str, step: &str| Capacity {
        value: Amount(value.clone()),
        request_policy: (sharing == Sharing::Shares).then(|| range(min, value, step)),
    };
    Device {
        name: device_name(gpu.index),
        attributes,
        capacity: BTreeMap::from([
            // A claim for no compute gets what the others leave, as in gpushare's dialect.
            (CORES.to_owned(), capacity(Percent::WHOLE.0.to_string(), "0", "1")),
            (MEMORY.to_owned(), capacity(mebibytes(gpu.memory), "1Mi", "1Mi")),
        ]),
        allow_multiple_allocations: sharing == Sharing::Shares,
        taints: taint(gpu.health).into_iter().collect(),
    }
}

/// Returns an amount of memory in the canonical form of a quantity: with the largest binary suffix that divides
/// it. The API server stores it so, and what is read back can be compared.
fn mebibytes(memory: MiB) -> String {
    let suffixes = ["Mi", "Gi", "Ti", "Pi", "Ei"];
    let (mut value, mut suffix) = (memory.0, 0);
    while value.is_multiple_of(1024) && value > 0 && suffix + 1 < suffixes.len() {
        (value, suffix) = (value / 1024, suffix + 1);
    }
    format!("{value}{}", suffixes[suffix])
}

fn taint(health: Health) -> Option<DeviceTaint> {
    let reason = match health {
        Health::Healthy => return None,
        Health::Unhealthy => "broken",
        Health::InMigMode => "mig-mode",
        Health::AwaitingReset => "awaiting-reset",
        Health::Cordoned => "cordoned",
    };
    Some(DeviceTaint {
        key: TAINT_KEY.to_owned(),
        value: reason.to_owned(),
        effect: NO_SCHEDULE.to_owned(),
        time_added: None,
    })
}
