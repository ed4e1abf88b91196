//! The fields of pods that Tessera reads, with the field numbers of Kubernetes' protobuf messages. Other fields are
//! skipped when a message is decoded. Each message serializes to the JSON of the same object.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use prost::Message;
use serde::{Serialize, Serializer};
use tessera_wire::foreign::objects::SUBMITTER;

/// An event of a watch.
#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchEvent {
    #[prost(string, tag = "1")]
    pub(super) kind: String,
    #[prost(message, optional, tag = "2")]
    pub(super) object: Option<RawExtension>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RawExtension {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) raw: bytes::Bytes,
}

/// An object of any kind, behind the prefix of protobuf objects.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Unknown {
    #[prost(message, optional, tag = "1")]
    pub(super) type_meta: Option<TypeMeta>,
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) raw: bytes::Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TypeMeta {
    #[prost(string, tag = "2")]
    pub(super) kind: String,
}

/// An error that ends a watch.
#[derive(Clone, PartialEq, Message, Serialize)]
pub(super) struct Status {
    #[prost(string, tag = "2")]
    status: String,
    #[prost(string, tag = "3")]
    message: String,
    #[prost(string, tag = "4")]
    reason: String,
    #[prost(int32, tag = "6")]
    pub(super) code: i32,
}

#[derive(Clone, PartialEq, Message, Serialize)]
pub(super) struct Pod {
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) metadata: Option<ObjectMeta>,
    #[prost(message, optional, tag = "2")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) spec: Option<PodSpec>,
    #[prost(message, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) status: Option<PodStatus>,
}

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ObjectMeta {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    #[serde(skip_serializing_if = "String::is_empty")]
    generate_name: String,
    #[prost(string, tag = "3")]
    #[serde(skip_serializing_if = "String::is_empty")]
    namespace: String,
    #[prost(string, tag = "5")]
    #[serde(skip_serializing_if = "String::is_empty")]
    uid: String,
    #[prost(string, tag = "6")]
    resource_version: String,
    #[prost(message, optional, tag = "8")]
    #[serde(skip_serializing_if = "Option::is_none")]
    creation_timestamp: Option<Time>,
    #[prost(message, optional, tag = "9")]
    #[serde(skip_serializing_if = "Option::is_none")]
    deletion_timestamp: Option<Time>,
    #[prost(int64, optional, tag = "10")]
    #[serde(skip_serializing_if = "Option::is_none")]
    deletion_grace_period_seconds: Option<i64>,
    #[prost(btree_map = "string, string", tag = "11")]
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    labels: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = "12")]
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
struct Time {
    #[prost(int64, tag = "1")]
    seconds: i64,
}

impl Serialize for Time {
    /// Writes the time as JSON has it, in whole seconds.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let time = Timestamp::from_second(self.seconds).map_err(serde::ser::Error::custom)?;
        serializer.collect_str(&time)
    }
}

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(transparent)]
struct Quantity {
    #[prost(string, tag = "1")]
    string: String,
}

type Quantities = BTreeMap<String, Quantity>;

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PodSpec {
    #[prost(message, repeated, tag = "1")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    volumes: Vec<Volume>,
    #[prost(message, repeated, tag = "2")]
    pub(super) containers: Vec<Container>,
    #[prost(btree_map = "string, string", tag = "7")]
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    node_selector: BTreeMap<String, String>,
    #[prost(string, tag = "10")]
    #[serde(skip_serializing_if = "String::is_empty")]
    node_name: String,
    #[prost(message, optional, tag = "18")]
    #[serde(skip_serializing_if = "Option::is_none")]
    affinity: Option<Affinity>,
    #[prost(string, tag = "19")]
    scheduler_name: String,
    #[prost(message, repeated, tag = "20")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) init_containers: Vec<Container>,
    #[prost(message, repeated, tag = "22")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tolerations: Vec<Toleration>,
    #[prost(int32, optional, tag = "25")]
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<i32>,
    #[prost(string, optional, tag = "31")]
    #[serde(skip_serializing_if = "Option::is_none")]
    preemption_policy: Option<String>,
    #[prost(btree_map = "string, message", tag = "32")]
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    overhead: Quantities,
    #[prost(message, repeated, tag = "33")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    topology_spread_constraints: Vec<TopologySpreadConstraint>,
    #[prost(message, repeated, tag = "39")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    resource_claims: Vec<PodResourceClaim>,
    #[prost(message, optional, tag = "43")]
    #[serde(skip_serializing_if = "Option::is_none")]
    scheduling_group: Option<SchedulingGroup>,
}

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
struct SchedulingGroup {
    #[prost(string, tag = "1")]
    pod_group_name: String,
}

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
struct PodResourceClaim {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    resource_claim_name: Option<String>,
    #[prost(string, optional, tag = "4")]
    #[serde(skip_serializing_if = "Option::is_none")]
    resource_claim_template_name: Option<String>,
}

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
struct Affinity {
    #[prost(message, optional, tag = "1")]
    node_affinity: Option<NodeAffinity>,
    #[prost(message, optional, tag = "2")]
    pod_affinity: Option<PodTerms>,
    #[prost(message, optional, tag = "3")]
    pod_anti_affinity: Option<PodTerms>,
}

/// An affinity to nodes. Of the preferred terms only the number is read.
#[derive(Clone, PartialEq, Message, Serialize)]
struct NodeAffinity {
    #[prost(message, optional, tag = "1")]
    #[serde(
        rename = "requiredDuringSchedulingIgnoredDuringExecution",
        skip_serializing_if = "Option::is_none"
    )]
    required: Option<NodeSelector>,
    #[prost(bytes = "bytes", repeated, tag = "2")]
    #[serde(rename = "preferredDuringSchedulingIgnoredDuringExecution", serialize_with = "as_empty_objects")]
    preferred: Vec<bytes::Bytes>,
}

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeSelector {
    #[prost(message, repeated, tag = "1")]
    node_selector_terms: Vec<NodeSelectorTerm>,
}

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeSelectorTerm {
    #[prost(message, repeated, tag = "1")]
    match_expressions: Vec<SelectorRequirement>,
    #[prost(message, repeated, tag = "2")]
    match_fields: Vec<SelectorRequirement>,
}

/// A condition on a label, of a node or of a pod.
#[derive(Clone, PartialEq, Message, Serialize)]
struct SelectorRequirement {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(string, tag = "2")]
    operator: String,
    #[prost(string, repeated, tag = "3")]
    values: Vec<String>,
}

/// The terms of an affinity to pods. Of the preferred terms only the number is read.
#[derive(Clone, PartialEq, Message, Serialize)]
struct PodTerms {
    #[prost(message, repeated, tag = "1")]
    #[serde(rename = "requiredDuringSchedulingIgnoredDuringExecution")]
    required: Vec<PodAffinityTerm>,
    #[prost(bytes = "bytes", repeated, tag = "2")]
    #[serde(rename = "preferredDuringSchedulingIgnoredDuringExecution", serialize_with = "as_empty_objects")]
    preferred: Vec<bytes::Bytes>,
}

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
struct PodAffinityTerm {
    #[prost(message, optional, tag = "1")]
    label_selector: Option<LabelSelector>,
    #[prost(string, repeated, tag = "2")]
    namespaces: Vec<String>,
    #[prost(string, tag = "3")]
    topology_key: String,
    #[prost(message, optional, tag = "4")]
    namespace_selector: Option<LabelSelector>,
    #[prost(string, repeated, tag = "5")]
    match_label_keys: Vec<String>,
    #[prost(string, repeated, tag = "6")]
    mismatch_label_keys: Vec<String>,
}

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
struct LabelSelector {
    #[prost(btree_map = "string, string", tag = "1")]
    match_labels: BTreeMap<String, String>,
    #[prost(message, repeated, tag = "2")]
    match_expressions: Vec<SelectorRequirement>,
}

/// A volume, of which only the kind is read.
#[derive(Clone, PartialEq, Message, Serialize)]
struct Volume {
    #[prost(message, optional, tag = "2")]
    #[serde(flatten)]
    source: Option<VolumeSource>,
}

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
struct VolumeSource {
    #[prost(message, optional, tag = "10")]
    #[serde(skip_serializing_if = "Option::is_none")]
    persistent_volume_claim: Option<Unread>,
    #[prost(message, optional, tag = "29")]
    #[serde(skip_serializing_if = "Option::is_none")]
    ephemeral: Option<Unread>,
}

/// An object whose fields are not read.
#[derive(Clone, PartialEq, Message, Serialize)]
struct Unread {}

fn as_empty_objects<S: Serializer>(terms: &[bytes::Bytes], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(terms.iter().map(|_| BTreeMap::<(), ()>::new()))
}

#[derive(Clone, PartialEq, Message, Serialize)]
struct Toleration {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(string, tag = "2")]
    operator: String,
    #[prost(string, tag = "3")]
    value: String,
    #[prost(string, tag = "4")]
    effect: String,
}

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
struct TopologySpreadConstraint {
    #[prost(string, tag = "3")]
    when_unsatisfiable: String,
}

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Container {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, repeated, tag = "6")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ports: Vec<ContainerPort>,
    #[prost(message, repeated, tag = "7")]
    #[serde(serialize_with = "as_read_variables", skip_serializing_if = "Vec::is_empty")]
    env: Vec<EnvVar>,
    #[prost(message, optional, tag = "8")]
    #[serde(skip_serializing_if = "Option::is_none")]
    resources: Option<ResourceRequirements>,
    #[prost(string, tag = "24")]
    #[serde(skip_serializing_if = "String::is_empty")]
    restart_policy: String,
}

/// A port of a container. The API server fills in `hostPort` for pods that use the network of the host.
#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
struct ContainerPort {
    #[prost(int32, tag = "2")]
    host_port: i32,
    #[prost(string, tag = "4")]
    protocol: String,
    #[prost(string, tag = "5")]
    #[serde(rename = "hostIP")]
    host_ip: String,
}

#[derive(Clone, PartialEq, Message, Serialize)]
struct EnvVar {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    value: String,
}

/// Leaves out the variables that Tessera does not read.
fn as_read_variables<S: Serializer>(all: &[EnvVar], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(all.iter().filter(|variable| variable.name == SUBMITTER))
}

#[derive(Clone, PartialEq, Message, Serialize)]
struct ResourceRequirements {
    #[prost(btree_map = "string, message", tag = "1")]
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    limits: Quantities,
    #[prost(btree_map = "string, message", tag = "2")]
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    requests: Quantities,
    #[prost(message, repeated, tag = "3")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    claims: Vec<ContainerClaim>,
}

#[derive(Clone, PartialEq, Message, Serialize)]
struct ContainerClaim {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    #[serde(skip_serializing_if = "String::is_empty")]
    request: String,
}

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PodStatus {
    #[prost(string, tag = "1")]
    #[serde(skip_serializing_if = "String::is_empty")]
    phase: String,
    #[prost(message, repeated, tag = "2")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    conditions: Vec<PodCondition>,
    #[prost(string, tag = "3")]
    #[serde(skip_serializing_if = "String::is_empty")]
    message: String,
    #[prost(message, optional, tag = "7")]
    #[serde(skip_serializing_if = "Option::is_none")]
    start_time: Option<Time>,
    #[prost(message, repeated, tag = "8")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    container_statuses: Vec<ContainerStatus>,
    #[prost(message, repeated, tag = "10")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    init_container_statuses: Vec<ContainerStatus>,
    #[prost(message, repeated, tag = "13")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ephemeral_container_statuses: Vec<ContainerStatus>,
    #[prost(message, repeated, tag = "15")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    resource_claim_statuses: Vec<PodResourceClaimStatus>,
    #[prost(message, optional, tag = "18")]
    #[serde(skip_serializing_if = "Option::is_none")]
    extended_resource_claim_status: Option<ExtendedResourceClaimStatus>,
}

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
struct PodResourceClaimStatus {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, optional, tag = "2")]
    #[serde(skip_serializing_if = "Option::is_none")]
    resource_claim_name: Option<String>,
}

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
struct ExtendedResourceClaimStatus {
    #[prost(message, repeated, tag = "1")]
    request_mappings: Vec<ExtendedResourceRequest>,
    #[prost(string, tag = "2")]
    resource_claim_name: String,
}

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
struct ExtendedResourceRequest {
    #[prost(string, tag = "1")]
    container_name: String,
    #[prost(string, tag = "2")]
    resource_name: String,
    #[prost(string, tag = "3")]
    request_name: String,
}

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
struct PodCondition {
    #[prost(string, tag = "1")]
    #[serde(rename = "type")]
    kind: String,
    #[prost(string, tag = "2")]
    status: String,
    #[prost(message, optional, tag = "4")]
    #[serde(skip_serializing_if = "Option::is_none")]
    last_transition_time: Option<Time>,
    #[prost(string, tag = "5")]
    reason: String,
    #[prost(string, tag = "6")]
    message: String,
}

#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
struct ContainerStatus {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    last_state: Option<ContainerState>,
    #[prost(string, tag = "8")]
    #[serde(rename = "containerID")]
    container_id: String,
}

#[derive(Clone, PartialEq, Message, Serialize)]
struct ContainerState {
    #[prost(message, optional, tag = "3")]
    terminated: Option<ContainerStateTerminated>,
}

#[derive(Clone, PartialEq, Message, Serialize)]
struct ContainerStateTerminated {
    #[prost(string, tag = "7")]
    #[serde(rename = "containerID")]
    container_id: String,
}
