//! How the agent of a node is set.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tessera_core::{placement::Policy, units::NodeName};
use tessera_node::device_plugin::RegistrationMode;
use tessera_wire::{
    foreign::dialect::{Dialect, MemoryUnit},
    kubelet::container_response::InjectionSettings,
};

use super::Isolation;

/// How the agent of a node is set.
#[derive(Clone, Debug)]
pub struct AgentSettings {
    /// The node.
    pub node: NodeName,
    /// The vocabularies served.
    pub dialects: Vec<Dialect>,
    /// What one unit of `aliyun.com/gpu-mem` shall be.
    pub memory_unit: MemoryUnit,
    /// How GPUs are chosen for pods that nobody placed.
    pub policy: Policy,
    /// How GPUs are handed to containers.
    pub hand_over: InjectionSettings,
    /// Where plugins and the kubelet meet.
    pub registration: RegistrationMode,
    /// How containers are held to their shares.
    pub isolation: Isolation,
    /// Where grant directories lie on the node.
    pub grants: String,
    /// The node's type, where the administrator says; otherwise its label does.
    pub instance_type: Option<String>,
    /// Labels to set on the node.
    pub labels: BTreeMap<String, String>,
    /// How long a GPU that had a passing trouble must stay quiet to be trusted again.
    pub quiet_time: Duration,
    /// Errors of the driver that are passed over, beside those of programs.
    pub ignored_xids: BTreeSet<u64>,
    /// Where others reach this agent's pages, if they do.
    pub advertise: Option<String>,
}
