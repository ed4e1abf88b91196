//! Reservations of GPUs that people make: the node annotation `tessera.dev/reservations`.
//!
//! A node is the simplest safe home of a reservation. The scheduler watches nodes already, so it needs no further
//! rights and finds all reservations again after a restart. Users who may not change nodes cannot reserve GPUs, and
//! one write changes all reservations of a node at the same time.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tessera_core::grant::{ContainerGrant, Hold, PodGrant};
use tessera_core::ledger::ReservationName;
use tessera_core::node::NodeState;
use tessera_core::request::ContainerRole;
use tessera_core::units::{GpuIndex, MiB, MilliCpu, NodeName, Percent, PodUid};

use crate::foreign::time;

/// Annotation of a node with the reservations of its GPUs, as a JSON array.
pub const KEY: &str = "tessera.dev/reservations";

/// Start of the names that these reservations have in the ledger.
pub const LEDGER_PREFIX: &str = "node/";

/// Largest number of reservations of one node. A node has at most 64 GPUs.
const MAX_RESERVATIONS: usize = 64;

/// Largest number of bytes in a name or an owner. The namespace and the name of a pod have up to 316.
const MAX_TEXT: usize = 512;

/// GPUs of one node that are kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeReservation {
    /// Name of the reservation, unique on the node.
    pub name: String,
    /// The person or program that made the reservation.
    pub owner: String,
    /// Time in UTC at which the reservation ends, such as `2026-01-02T03:04:05Z`.
    pub until: String,
    /// The waiting pod that the GPUs are kept for. Without one, no pod gets them before the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<ReservedPod>,
    /// The kept parts of GPUs.
    pub gpus: Vec<ReservedGpu>,
}

/// The pod that GPUs are kept for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReservedPod {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// UID of the pod.
    pub uid: String,
}

/// The kept part of one GPU: a share, or the whole GPU if neither part is named.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReservedGpu {
    /// UUID of the GPU.
    pub uuid: String,
    /// Percentage of the GPU's compute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub percent: Option<u32>,
    /// Memory of the GPU in MiB.
    #[serde(rename = "memoryMiB", default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
}

/// The reason why the annotation cannot be parsed. None of its reservations counts then.
#[derive(Debug, thiserror::Error)]
pub enum BadReservations {
    /// The text is not JSON of this form.
    #[error("annotation {KEY} is not understood: {0}; remove it to end all reservations of the node")]
    Json(#[from] serde_json::Error),
    /// The end of a reservation is not a time.
    #[error(
        "annotation {KEY}: the end {until:?} of reservation {name:?} is not a time such as 2026-01-02T03:04:05Z"
    )]
    Until {
        /// Name of the reservation.
        name: String,
        /// The text that is not a time.
        until: String,
    },
    /// The annotation is too long.
    #[error("annotation {KEY} has too many reservations, or too long names; remove some of them")]
    TooLong,
}

/// Returns the reservations of a node with these annotations.
///
/// # Errors
/// [`BadReservations`] if the annotation has another form.
pub fn parse(annotations: &BTreeMap<String, String>) -> Result<Vec<NodeReservation>, BadReservations> {
    let Some(text) = annotations.get(KEY).filter(|text| !text.trim().is_empty()) else {
        return Ok(Vec::new());
    };
    let found: Vec<NodeReservation> = serde_json::from_str(text)?;
    let is_long = |text: &String| text.len() > MAX_TEXT;
    let is_too_long = |entry: &NodeReservation| is_long(&entry.name) || is_long(&entry.owner);
    if found.len() > MAX_RESERVATIONS || found.iter().any(is_too_long) {
        return Err(BadReservations::TooLong);
    }
    for entry in &found {
        if time::unix_seconds(&entry.until).is_none() {
            return Err(BadReservations::Until { name: entry.name.clone(), until: entry.until.clone() });
        }
    }
    Ok(found)
}

/// Returns the annotation with these reservations, or `None` if there are none.
#[must_use]
pub fn print(reservations: &[NodeReservation]) -> Option<String> {
    (!reservations.is_empty()).then(|| serde_json::to_string(reservations).unwrap_or_default())
}

impl NodeReservation {
    /// Returns the end of the reservation in seconds since 1970.
    #[must_use]
    pub fn until_seconds(&self) -> i64 {
        time::unix_seconds(&self.until).unwrap_or(0)
    }

    /// Returns the name of the reservation in the ledger.
    #[must_use]
    pub fn ledger_name(&self, node: &NodeName) -> ReservationName {
        ReservationName(format!("{LEDGER_PREFIX}{node}/{}", self.name))
    }

    /// Returns the object that the GPUs are kept for, as users know it.
    #[must_use]
    pub fn beneficiary(&self) -> String {
        match &self.pod {
            Some(pod) => format!("pod {}/{}", pod.namespace, pod.name),
            None => format!("{} ({})", self.name, self.owner),
        }
    }

    /// Describes the reservation to the user of its pod.
    #[must_use]
    pub fn describe(&self, node: &NodeName, is_free: bool) -> String {
        let Self { name, owner, until, .. } = self;
        let room = if is_free { "all of them are free" } else { "not all of them are free yet" };
        format!(
            "GPUs of node {node} are reserved for this pod until {until} ({name}, made by {owner}); {room}"
        )
    }

    /// Returns the UID under which the ledger keeps the parts while the pod cannot use them. No pod has such a UID,
    /// because UIDs have no spaces.
    #[must_use]
    pub fn holder(&self, state: &NodeState) -> PodUid {
        PodUid(format!("reservation {} {}", state.node().name, self.name))
    }

    /// Returns the reserved parts that are free on the node, or `None` if nothing is.
    #[must_use]
    pub fn free_parts(&self, state: &NodeState) -> Option<PodGrant> {
        let free = |(gpu, wanted): (GpuIndex, Hold)| Some((gpu, wanted.limited_to(state.free_hold(gpu)?)?));
        let holds: Vec<(GpuIndex, Hold)> = self.wanted(state).into_iter().filter_map(free).collect();
        (!holds.is_empty()).then(|| self.grant(state, holds))
    }

    /// Returns whether all reserved parts are free on the node.
    #[must_use]
    pub fn is_free(&self, state: &NodeState) -> bool {
        let wanted = self.wanted(state);
        wanted.len() == self.gpus.len() && wanted.iter().all(|(gpu, hold)| state.fits(*gpu, *hold))
    }

    fn grant(&self, state: &NodeState, holds: Vec<(GpuIndex, Hold)>) -> PodGrant {
        PodGrant {
            pod: self.holder(state),
            node: state.node().name.clone(),
            cpu: MilliCpu::ZERO,
            memory: MiB::ZERO,
            containers: vec![ContainerGrant { container: String::new(), role: ContainerRole::Main, holds }],
        }
    }

    /// Returns the reserved parts of GPUs that the node has, each GPU once, by ascending index.
    fn wanted(&self, state: &NodeState) -> Vec<(GpuIndex, Hold)> {
        let node = state.node();
        let hold = |gpu: &ReservedGpu| match (gpu.percent, gpu.memory_mib) {
            (None, None) => Hold::Whole,
            (percent, memory) => Hold::Share {
                compute_percent: Percent(percent.unwrap_or(0).min(100)),
                memory: MiB(memory.unwrap_or(0)),
            },
        };
        node.gpus()
            .iter()
            .filter_map(|known| {
                let reserved = self.gpus.iter().find(|gpu| *gpu.uuid == *known.uuid.0)?;
                Some((known.index, hold(reserved)))
            })
            .collect()
    }

    /// Creates a reservation of what a grant holds of a node.
    #[must_use]
    pub fn of_grant(
        (name, owner): (String, String),
        until_seconds: i64,
        pod: Option<ReservedPod>,
        (place, state): (&PodGrant, &NodeState),
    ) -> Self {
        let part = |(gpu, usage): (GpuIndex, tessera_core::grant::GpuUsage)| {
            let uuid = state.node().gpu(gpu)?.uuid.to_string();
            let share = (!usage.whole).then_some(usage);
            Some(ReservedGpu {
                uuid,
                percent: share.map(|share| share.compute_percent.0),
                memory_mib: share.map(|share| share.memory.0),
            })
        };
        let gpus = place.footprint().filter_map(part).collect();
        Self { name, owner, until: time::rfc3339(until_seconds), pod, gpus }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tessera_core::gpu::Gpu;
    use tessera_core::node::Node;
    use tessera_core::topology::Topology;

    use super::*;

    fn state() -> NodeState {
        let gpu = |index: u8| {
            Gpu::new(GpuIndex(index), format!("GPU-{index}").as_str().into(), "T4".into(), MiB(1000))
        };
        let gpus = vec![gpu(0), gpu(1)];
        let node = Node::new("n".into(), gpus, Topology::unknown(2), MilliCpu(8000), MiB(32_768)).unwrap();
        NodeState::empty(Arc::new(node))
    }

    fn used(gpu: u8, hold: Hold) -> PodGrant {
        let holds = vec![(GpuIndex(gpu), hold)];
        PodGrant {
            pod: "p".into(),
            node: "n".into(),
            cpu: MilliCpu::ZERO,
            memory: MiB::ZERO,
            containers: vec![ContainerGrant { container: "main".into(), role: ContainerRole::Main, holds }],
        }
    }

    fn annotations(text: &str) -> BTreeMap<String, String> {
        [(KEY.to_owned(), text.to_owned())].into()
    }

    fn reservation() -> NodeReservation {
        let text = r#"[{"name": "r", "owner": "jane", "until": "2026-01-02T03:04:05Z",
            "pod": {"namespace": "team", "name": "large", "uid": "u"},
            "gpus": [{"uuid": "GPU-0"}, {"uuid": "GPU-1", "percent": 30, "memoryMiB": 400}]}]"#;
        let parsed = parse(&annotations(text)).unwrap();
        assert_eq!(parse(&annotations(&print(&parsed).unwrap())).unwrap(), parsed);
        parsed.into_iter().next().unwrap()
    }

    #[test]
    fn keeps_what_is_free_of_the_reserved_parts() {
        let (reservation, mut state) = (reservation(), state());
        let share = |compute_percent, memory| Hold::Share {
            compute_percent: Percent(compute_percent),
            memory: MiB(memory),
        };
        let holds =
            |state: &NodeState| reservation.free_parts(state).map(|place| place.containers[0].holds.clone());
        assert_eq!(holds(&state), Some(vec![(GpuIndex(0), Hold::Whole), (GpuIndex(1), share(30, 400))]));
        assert!(reservation.is_free(&state));
        state.add(&used(1, share(80, 100)));
        assert_eq!(holds(&state), Some(vec![(GpuIndex(0), Hold::Whole), (GpuIndex(1), share(20, 400))]));
        assert!(!reservation.is_free(&state));
        state.add(&used(0, Hold::Whole));
        assert_eq!(holds(&state), Some(vec![(GpuIndex(1), share(20, 400))]));
        assert_eq!(reservation.beneficiary(), "pod team/large");
    }

    #[test]
    fn reads_a_grant_as_it_was_written() {
        let (state, place) =
            (state(), used(1, Hold::Share { compute_percent: Percent(50), memory: MiB(500) }));
        let written = NodeReservation::of_grant(("r".into(), "jane".into()), 0, None, (&place, &state));
        assert_eq!(written.until, "1970-01-01T00:00:00Z");
        let free = written.free_parts(&state).unwrap();
        assert_eq!(free.containers[0].holds, place.containers[0].holds);
    }

    #[test]
    fn rejects_what_it_cannot_read() {
        let said = |text: &str| parse(&annotations(text)).unwrap_err().to_string();
        assert!(said("nonsense").starts_with("annotation tessera.dev/reservations is not understood"));
        let until = r#"[{"name": "r", "owner": "j", "until": "soon", "gpus": []}]"#;
        assert!(said(until).contains(r#"the end "soon" of reservation "r" is not a time"#));
        let long =
            format!(r#"[{{"name": "{}", "owner": "j", "until": "soon", "gpus": []}}]"#, "x".repeat(513));
        assert!(said(&long).contains("too long names"));
        assert!(parse(&BTreeMap::new()).unwrap().is_empty());
    }
}
