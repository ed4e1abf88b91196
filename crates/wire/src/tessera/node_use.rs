//! Current use of a node's GPUs, by GPU and by container. The agent serves this JSON at [`PATH`]
//! for the dashboard and for `kubectl inspect gpu top`.
//!
//! A value that could not be measured is absent, never zero.

use serde::{Deserialize, Serialize};

/// Path of the JSON on the agent.
pub const PATH: &str = "/v1/use";

/// Returns the path of [`MeasuredUse`] on the scheduler.
#[must_use]
pub fn scheduler_path(node: &str) -> String {
    format!("/api/v1/nodes/{node}/use")
}

/// Use of one node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeUse {
    /// GPUs by ascending index.
    pub gpus: Vec<GpuUse>,
    /// Containers with a grant or a process on a GPU, sorted by namespace, pod and container.
    pub containers: Vec<ContainerUse>,
}

/// Use of one node as the scheduler reports it: the answer of the node's agent, or why there is none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MeasuredUse {
    /// Answer of the agent.
    #[serde(rename = "use", default, skip_serializing_if = "Option::is_none")]
    pub used: Option<NodeUse>,
    /// Reason why there is no answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_measured: Option<String>,
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
    fn omits_values_that_were_not_measured() {
        let text = r#"{"gpus":[{"uuid":"GPU-a","index":0}],"containers":[{"namespace":"n","pod":"p","uid":"u","container":"c","gpus":[{"uuid":"GPU-a","index":0,"grantedPercent":30,"grantedMiB":1024,"memoryUsedMiB":512}]}]}"#;
        let read: NodeUse = serde_json::from_str(text).expect("the form above");
        assert_eq!(read.gpus[0].busy_percent, None);
        assert_eq!(read.containers[0].gpus[0].memory_used_mib, Some(512));
        assert_eq!(serde_json::to_string(&read).expect("plain values"), text);
    }
}
