//! Settings of a node's agent.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::Duration,
};

use tessera_core::{placement::Policy, units::NodeName};
use tessera_node::device_plugin::RegistrationMode;
use tessera_wire::{
    foreign::dialect::{Dialect, MemoryUnit},
    kubelet::{container_response::InjectionSettings, device_id::Resource},
    tessera::agent_address::AgentAddress,
};

use super::{Isolation, MigStrategy};

/// Settings of a node's agent, as the command line defines them.
#[derive(Clone, Debug)]
pub struct AgentSettings {
    /// Name of the node.
    pub node: NodeName,
    /// Dialects whose resources the agent serves.
    pub dialects: Vec<Dialect>,
    /// Dialects that the agent would serve if no other device plugin of the node did.
    pub left_to_others: Vec<Dialect>,
    /// Requested size of one unit of `aliyun.com/gpu-mem`.
    pub memory_unit: MemoryUnit,
    /// Devices of `nvidia.com/gpu` per GPU, if HAMi's dialect is served.
    pub nvidia_slots: u16,
    /// Whether devices of a dialect are withdrawn while other dialects hold their GPUs.
    pub withdraw_held: bool,
    /// How instances of GPUs in MIG mode are offered.
    pub mig_strategy: MigStrategy,
    /// Policy that chooses GPUs for pods without a grant.
    pub policy: Policy,
    /// Form of the answers to `Allocate`.
    pub injection: InjectionSettings,
    /// Directory in which plugins and the kubelet find each other.
    pub registration: RegistrationMode,
    /// How claims of dynamic resource allocation are served, or `None` if they are not.
    pub claims: Option<ClaimSettings>,
    /// How containers are held to their shares.
    pub isolation: Isolation,
    /// Grants directory on the node.
    pub grants: String,
    /// Instance type of the node. `None` takes the node's label.
    pub instance_type: Option<String>,
    /// Labels to set on the node.
    pub labels: BTreeMap<String, String>,
    /// How long a GPU must be free of errors after a transient one before it is offered again.
    pub quiet_time: Duration,
    /// XIDs to ignore, in addition to those that applications cause.
    pub ignored_xids: BTreeSet<u64>,
    /// Whether GPUs are offered although retired memory waits for a reset.
    pub ignore_pending_reset: bool,
    /// Address under which others reach this agent's pages.
    pub advertise: Option<AgentAddress>,
}

/// Where the files and sockets of claims are.
#[derive(Clone, Debug)]
pub struct ClaimSettings {
    /// Directory with CDI specifications, which the container runtime reads.
    pub cdi_directory: PathBuf,
    /// Directory in which the kubelet looks for registration sockets.
    pub registry: PathBuf,
    /// Directory for the sockets of drivers.
    pub plugins: PathBuf,
}

impl AgentSettings {
    /// Returns the resources of the served dialects.
    pub fn resources(&self) -> impl Iterator<Item = Resource> {
        let is_served = |resource: &Resource| {
            self.dialects.iter().any(|dialect| Resource::of(*dialect).any(|served| served == *resource))
        };
        Resource::ALL.into_iter().filter(is_served)
    }

    /// Returns the number of `nvidia.com/gpu` devices per GPU, or `None` if each GPU is one device.
    pub(super) fn slots(&self) -> Option<u16> {
        self.dialects.contains(&Dialect::Hami).then_some(self.nvidia_slots)
    }
}
