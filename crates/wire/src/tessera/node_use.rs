//! What is used on a node right now, GPU by GPU and container by container: the JSON the agent answers at [`PATH`], read by the
//! dashboard and by `kubectl inspect gpu top`.
//!
//! A value that could not be measured is absent, never zero.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::foreign::objects::Node;

/// The path on the agent.
pub const PATH: &str = "/v1/use";

/// The node annotation with the agent's address, such as `http://10.0.0.5:5678`. Without it: the node's internal address and
/// [`DEFAULT_PORT`].
pub const ADDRESS_KEY: &str = "tessera.dev/agent";

/// Where an agent listens unless told otherwise.
pub const DEFAULT_PORT: u16 = 5678;

/// Where a node's agent answers, by the node's own word: the annotation, or its internal address.
#[must_use]
pub fn address(node: &Node) -> Option<String> {
    if let Some(told) = node.metadata.annotations.get(ADDRESS_KEY) {
        return Some(told.clone());
    }
    let internal = node.status.addresses.iter().find(|address| address.kind == "InternalIP")?;
    Some(match internal.address.parse() {
        Ok(IpAddr::V6(address)) => format!("http://[{address}]:{DEFAULT_PORT}"),
        _ => format!("http://{}:{DEFAULT_PORT}", internal.address),
    })
}

/// One node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeUse {
    /// Its GPUs by ascending index.
    pub gpus: Vec<GpuUse>,
    /// Containers with a grant or with a process on a GPU, by namespace, pod and container.
    pub containers: Vec<ContainerUse>,
}

/// One GPU as a whole, whoever uses it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuUse {
    /// Which GPU.
    pub uuid: String,
    /// Its position on the node.
    pub index: u8,
    /// Memory in use, the driver's own included.
    #[serde(rename = "memoryUsedMiB", default, skip_serializing_if = "Option::is_none")]
    pub memory_used_mib: Option<u64>,
    /// The part of the last interval in which any kernel ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_percent: Option<f64>,
}

/// One container.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ContainerUse {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The pod's UID.
    pub uid: String,
    /// The container's name.
    pub container: String,
    /// The GPUs it holds or uses, by ascending index.
    pub gpus: Vec<ShareUse>,
}

/// What one container holds and uses of one GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareUse {
    /// Which GPU.
    pub uuid: String,
    /// Its position on the node.
    pub index: u8,
    /// Percent of the GPU's compute granted: 100 for a whole GPU, 0 for memory alone; absent without a grant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub granted_percent: Option<u32>,
    /// Memory granted; absent without a grant.
    #[serde(rename = "grantedMiB", default, skip_serializing_if = "Option::is_none")]
    pub granted_mib: Option<u64>,
    /// Memory its processes hold.
    #[serde(rename = "memoryUsedMiB", default, skip_serializing_if = "Option::is_none")]
    pub memory_used_mib: Option<u64>,
    /// The part of the last interval in which its kernels ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_percent: Option<f64>,
    /// The part of the last interval in which it waited for its share.
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
    fn what_was_not_measured_is_left_out() {
        let text = r#"{"gpus":[{"uuid":"GPU-a","index":0}],"containers":[{"namespace":"n","pod":"p","uid":"u","container":"c","gpus":[{"uuid":"GPU-a","index":0,"grantedPercent":30,"grantedMiB":1024,"memoryUsedMiB":512}]}]}"#;
        let read: NodeUse = serde_json::from_str(text).expect("the form above");
        assert_eq!(read.gpus[0].busy_percent, None);
        assert_eq!(read.containers[0].gpus[0].memory_used_mib, Some(512));
        assert_eq!(serde_json::to_string(&read).expect("plain values"), text);
    }
}
