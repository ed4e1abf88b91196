//! Current use of a node's GPUs, by GPU and by container. The agent serves this JSON at [`PATH`]
//! for the dashboard and for `kubectl inspect gpu top`.
//!
//! A value that could not be measured is absent, never zero.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::foreign::objects::Node;

/// Path of the JSON on the agent.
pub const PATH: &str = "/v1/use";

/// Node annotation with the agent's address, such as `http://10.0.0.5:5678`. If it is absent,
/// clients use the node's internal address and [`DEFAULT_PORT`].
pub const ADDRESS_KEY: &str = "tessera.dev/agent";

/// Default port of the agent.
pub const DEFAULT_PORT: u16 = 5678;

/// Returns the address of a node's agent from the node's annotation or its internal address.
#[must_use]
pub fn address(node: &Node) -> Option<String> {
    if let Some(published) = node.metadata.annotations.get(ADDRESS_KEY) {
        return Some(published.clone());
    }
    let internal = node.status.addresses.iter().find(|address| address.kind == "InternalIP")?;
    Some(match internal.address.parse() {
        Ok(IpAddr::V6(address)) => format!("http://[{address}]:{DEFAULT_PORT}"),
        _ => format!("http://{}:{DEFAULT_PORT}", internal.address),
    })
}

/// Use of one node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeUse {
    /// GPUs by ascending index.
    pub gpus: Vec<GpuUse>,
    /// Containers with a grant or a process on a GPU, sorted by namespace, pod and container.
    pub containers: Vec<ContainerUse>,
}

/// Use of one GPU by all processes together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuUse {
    /// UUID of the GPU.
    pub uuid: String,
    /// Index of the GPU on the node.
    pub index: u8,
    /// Used memory, including the driver's own.
    #[serde(rename = "memoryUsedMiB", default, skip_serializing_if = "Option::is_none")]
    pub memory_used_mib: Option<u64>,
    /// Percent of the last interval in which any kernel ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_percent: Option<f64>,
}

/// Use of one container.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ContainerUse {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// UID of the pod.
    pub uid: String,
    /// Name of the container.
    pub container: String,
    /// GPUs that the container holds or uses, by ascending index.
    pub gpus: Vec<ShareUse>,
}

/// Grant and use of one container on one GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareUse {
    /// UUID of the GPU.
    pub uuid: String,
    /// Index of the GPU on the node.
    pub index: u8,
    /// Granted percent of the GPU's compute: 100 for a whole GPU, 0 for memory only, absent without
    /// a grant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub granted_percent: Option<u32>,
    /// Granted memory, absent without a grant.
    #[serde(rename = "grantedMiB", default, skip_serializing_if = "Option::is_none")]
    pub granted_mib: Option<u64>,
    /// Memory that the container's processes hold.
    #[serde(rename = "memoryUsedMiB", default, skip_serializing_if = "Option::is_none")]
    pub memory_used_mib: Option<u64>,
    /// Percent of the last interval in which the container's kernels ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_percent: Option<f64>,
    /// Percent of the last interval in which the container waited for its share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub throttled_percent: Option<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_is_found_by_annotation_or_by_the_internal_address() {
        let check = |node: &str, expected: Option<&str>| {
            let node: Node = serde_json::from_str(node).expect("a node");
            assert_eq!(address(&node).as_deref(), expected);
        };
        let at = |ip: &str| {
            format!(
                r#"{{"status":{{"addresses":[{{"type":"Hostname","address":"n"}},{{"type":"InternalIP","address":"{ip}"}}]}}}}"#
            )
        };
        check("{}", None);
        check(r#"{"metadata":{"annotations":{"tessera.dev/agent":"http://a:1"}}}"#, Some("http://a:1"));
        check(&at("10.0.0.5"), Some("http://10.0.0.5:5678"));
        check(&at("fd00::5"), Some("http://[fd00::5]:5678"));
    }

    #[test]
    fn omits_values_that_were_not_measured() {
        let text = r#"{"gpus":[{"uuid":"GPU-a","index":0}],"containers":[{"namespace":"n","pod":"p","uid":"u","container":"c","gpus":[{"uuid":"GPU-a","index":0,"grantedPercent":30,"grantedMiB":1024,"memoryUsedMiB":512}]}]}"#;
        let read: NodeUse = serde_json::from_str(text).expect("the form above");
        assert_eq!(read.gpus[0].busy_percent, None);
        assert_eq!(read.containers[0].gpus[0].memory_used_mib, Some(512));
        assert_eq!(serde_json::to_string(&read).expect("plain values"), text);
    }
}
