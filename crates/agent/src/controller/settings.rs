//! Settings of a node's agent.

use std::{
    collections::{BTreeMap, BTreeSet},
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
    /// Requested size of one unit of `aliyun.com/gpu-mem`.
    pub memory_unit: MemoryUnit,
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

impl AgentSettings {
    /// Returns the resources of the served dialects.
    pub fn resources(&self) -> impl Iterator<Item = Resource> {
        Resource::ALL.into_iter().filter(|resource| self.dialects.contains(&resource.dialect()))
    }
}
