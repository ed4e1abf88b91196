//! The record of a prepared claim, which the agent keeps on the node's disk.
//!
//! The kubelet does not ask again for a claim that it has prepared, also not after a restart of the node. So the
//! record has all that the agent needs to make the claim's files again, and to release the claim when it is gone.

use serde::{Deserialize, Serialize};
use tessera_core::gpu::GpuUuid;
use tessera_core::grant::Hold;
use tessera_core::units::{MiB, Percent};

/// A claim that is prepared on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreparedClaim {
    /// UID of the claim.
    pub uid: String,
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// Devices of the claim, in the order of its results.
    pub devices: Vec<PreparedGpu>,
}

/// One GPU of a prepared claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreparedGpu {
    /// Name of the request, or `request/alternative` for one of several alternatives.
    pub request: String,
    /// Name of the device.
    pub device: String,
    /// UUID of the GPU, which stays the same when GPUs are numbered anew.
    pub gpu: GpuUuid,
    /// What the claim holds, or `None` for administrative access.
    pub hold: Option<Hold>,
    /// Identifies the share.
    pub share_id: Option<String>,
}

/// A record that cannot be parsed.
#[derive(Debug, thiserror::Error)]
#[error("not the record of a prepared claim: {0}")]
pub struct BadRecord(#[from] serde_json::Error);

#[derive(Serialize, Deserialize)]
struct Document {
    uid: String,
    namespace: String,
    name: String,
    devices: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    request: String,
    device: String,
    uuid: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    share_id: Option<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    admin_access: bool,
    /// Percent of compute. Without it and without an amount of memory the claim holds the whole GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cores: Option<u32>,
    #[serde(rename = "memoryMiB", default, skip_serializing_if = "Option::is_none")]
    memory_mib: Option<u64>,
}

impl PreparedClaim {
    /// Writes the record.
    #[must_use]
    pub fn print(&self) -> String {
        let entry = |one: &PreparedGpu| {
            let (cores, memory_mib) = match one.hold {
                Some(Hold::Share { compute_percent, memory }) => (Some(compute_percent.0), Some(memory.0)),
                Some(Hold::Whole) | None => (None, None),
            };
            Entry {
                request: one.request.clone(),
                device: one.device.clone(),
                uuid: one.gpu.to_string(),
                share_id: one.share_id.clone(),
                admin_access: one.hold.is_none(),
                cores,
                memory_mib,
            }
        };
        let document = Document {
            uid: self.uid.clone(),
            namespace: self.namespace.clone(),
            name: self.name.clone(),
            devices: self.devices.iter().map(entry).collect(),
        };
        // Serializing numbers and strings cannot fail.
        serde_json::to_string(&document).unwrap_or_default()
    }

    /// Parses a record.
    pub fn parse(json: &str) -> Result<Self, BadRecord> {
        let Document { uid, namespace, name, devices } = serde_json::from_str(json)?;
        let device = |entry: Entry| {
            let hold = match (entry.admin_access, entry.cores, entry.memory_mib) {
                (true, ..) => None,
                (false, Some(cores), Some(memory)) => {
                    Some(Hold::Share { compute_percent: Percent(cores), memory: MiB(memory) })
                }
                (false, ..) => Some(Hold::Whole),
            };
            PreparedGpu {
                request: entry.request,
                device: entry.device,
                gpu: entry.uuid.as_str().into(),
                hold,
                share_id: entry.share_id,
            }
        };
        Ok(Self { uid, namespace, name, devices: devices.into_iter().map(device).collect() })
    }

    /// Returns the names of the requests with devices, each once, in the order of the results.
    #[must_use]
    pub fn requests(&self) -> Vec<&str> {
        let mut requests: Vec<&str> = Vec::new();
        for device in &self.devices {
            if !requests.contains(&device.request.as_str()) {
                requests.push(&device.request);
            }
        }
        requests
    }

    /// Returns the devices of one request.
    pub fn of_request<'a>(&'a self, request: &'a str) -> impl Iterator<Item = &'a PreparedGpu> {
        self.devices.iter().filter(move |device| device.request == request)
    }
}

/// Returns the name of a request's grant directory and of the end of its CDI device's name. The slash before an
/// alternative is replaced, and no name of a request has a dot.
#[must_use]
pub fn request_directory(request: &str) -> String {
    request.replace('/', ".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_written() {
        let device = |request: &str, hold: Option<Hold>, share: Option<&str>| PreparedGpu {
            request: request.into(),
            device: "gpu-1".into(),
            gpu: "GPU-1".into(),
            hold,
            share_id: share.map(str::to_owned),
        };
        let share = Hold::Share { compute_percent: Percent(0), memory: MiB(8192) };
        let claim = PreparedClaim {
            uid: "u".into(),
            namespace: "team".into(),
            name: "c".into(),
            devices: vec![
                device("a", Some(share), Some("s")),
                device("b/any", Some(Hold::Whole), None),
                device("a", Some(share), None),
                device("watch", None, None),
            ],
        };
        assert_eq!(PreparedClaim::parse(&claim.print()).unwrap(), claim);
        assert_eq!(claim.requests(), ["a", "b/any", "watch"]);
        assert_eq!(claim.of_request("a").count(), 2);
        assert_eq!(request_directory("b/any"), "b.any");
        assert!(PreparedClaim::parse("{}").unwrap_err().to_string().contains("missing field"));
    }
}
