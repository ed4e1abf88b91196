//! The record of a prepared claim, which the agent keeps on the node's disk.
//!
//! The kubelet does not ask again for a claim that it has prepared, also not after a restart of the node. So the
//! record has all that the agent needs to make the claim's files again, and to release the claim when it is gone.

use serde::{Deserialize, Serialize};
use tessera_core::gpu::GpuUuid;
use tessera_core::grant::{GpuUsage, Hold};
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
    /// Percentage of the GPU's time that the claim may use while others leave it idle; `None` for a hard share.
    pub cores_limit: Option<Percent>,
    /// Identifies the share.
    pub share_id: Option<String>,
}

/// What a claim may use of a GPU by one grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantedGpu<'a> {
    /// The first device of the grant on the GPU.
    pub device: &'a PreparedGpu,
    /// The sum of what the claim holds of the GPU.
    pub usage: GpuUsage,
    /// Percentage of the GPU's time that the claim may use while others leave it idle.
    pub cores_limit: Percent,
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
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cores_limit: Option<u32>,
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
                cores_limit: one.cores_limit.map(|limit| limit.0),
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
                cores_limit: entry.cores_limit.map(Percent),
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

    /// Returns the request whose grant directory serves a request: the first one that has parts of the same GPUs, or of
    /// GPUs that yet another request shares with both. A claim may use the sum of its parts of a GPU, so requests with
    /// parts of one GPU have one grant with one account.
    #[must_use]
    pub fn grant_of<'a>(&'a self, request: &'a str) -> &'a str {
        let holders = || self.devices.iter().filter(|device| device.hold.is_some());
        let mut together: Vec<&str> = vec![request];
        loop {
            let shares = |device: &&PreparedGpu| {
                let is_same = |other: &PreparedGpu| {
                    other.gpu == device.gpu && together.contains(&other.request.as_str())
                };
                !together.contains(&device.request.as_str()) && holders().any(is_same)
            };
            match holders().find(shares) {
                Some(device) => together.push(&device.request),
                None => break,
            }
        }
        self.requests().into_iter().find(|name| together.contains(name)).unwrap_or(request)
    }

    /// Returns what the claim may use of each GPU by all requests with this grant, in the order of the results.
    /// Shares and their upper bounds add up, and no bound exceeds the GPU.
    #[must_use]
    pub fn of_grant(&self, grant: &str) -> Vec<GrantedGpu<'_>> {
        let mut granted: Vec<GrantedGpu<'_>> = Vec::new();
        for device in self.devices.iter().filter(|device| self.grant_of(&device.request) == grant) {
            let Some(hold) = device.hold else { continue };
            let usage = GpuUsage::of(hold);
            let own = if usage.whole { Percent::WHOLE } else { usage.compute_percent };
            let limit = device.cores_limit.map_or(own, |limit| limit.max(own));
            match granted.iter_mut().find(|known| known.device.gpu == device.gpu) {
                Some(known) => {
                    known.usage = known.usage.plus(usage);
                    known.cores_limit = Percent((known.cores_limit.0 + limit.0).min(Percent::WHOLE.0));
                }
                None => granted.push(GrantedGpu { device, usage, cores_limit: limit }),
            }
        }
        granted
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
            cores_limit: share.map(|_| Percent(80)),
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
        assert_eq!(["a", "b/any", "watch"].map(|request| claim.grant_of(request)), ["a", "a", "watch"]);
        assert!(PreparedClaim::parse("{}").unwrap_err().to_string().contains("missing field"));
    }

    #[test]
    fn requests_with_parts_of_one_gpu_have_one_grant_with_the_sum() {
        let device = |request: &str, gpu: &str, percent: u32, mib: u64| PreparedGpu {
            request: request.into(),
            device: "gpu".into(),
            gpu: gpu.into(),
            hold: Some(Hold::Share { compute_percent: Percent(percent), memory: MiB(mib) }),
            cores_limit: (percent == 20).then_some(Percent(60)),
            share_id: None,
        };
        let devices = vec![
            device("alone", "9", 10, 100),
            device("one", "0", 10, 100),
            device("two", "1", 20, 200),
            device("three", "1", 30, 400),
            device("three", "0", 30, 400),
        ];
        let mut claim =
            PreparedClaim { uid: "u".into(), namespace: "team".into(), name: "c".into(), devices };
        let grants = ["alone", "one", "two", "three"].map(|request| claim.grant_of(request));
        assert_eq!(grants, ["alone", "one", "one", "one"]);
        let held = |claim: &PreparedClaim, grant: &str| -> Vec<(String, u32, u64, u32)> {
            let granted = claim.of_grant(grant).into_iter();
            let amounts = |one: GrantedGpu<'_>| {
                let usage = one.usage;
                (one.device.gpu.to_string(), usage.compute_percent.0, usage.memory.0, one.cores_limit.0)
            };
            granted.map(amounts).collect()
        };
        assert_eq!(held(&claim, "alone"), [("9".to_owned(), 10, 100, 10)]);
        assert_eq!(held(&claim, "one"), [("0".to_owned(), 40, 500, 40), ("1".to_owned(), 50, 600, 90)]);
        assert_eq!(held(&claim, "two"), []);
        claim.devices[3].cores_limit = Some(Percent(100));
        assert_eq!(claim.of_grant("one")[1].cores_limit, Percent::WHOLE, "no bound exceeds the GPU");
    }
}
