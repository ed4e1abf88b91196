//! CDI specifications (Container Device Interface), with which a container runtime mounts `libtessera.so` into
//! containers and gives them the GPUs of claims.

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// Qualified CDI device name of the library.
pub const LIBRARY: &str = "tessera.dev/library=libtessera";

/// Name of the specification file in a CDI directory such as `/var/run/cdi`.
pub const FILE: &str = "tessera.dev-library.json";

/// Kind of the CDI devices of claims.
pub const CLAIM_KIND: &str = "tessera.dev/claim";

// containerd 1.7 reads version 0.5.0, and the specifications use no newer field.
const VERSION: &str = "0.5.0";

/// What a CDI device adds to a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerEdits {
    /// Name of the device.
    pub name: String,
    /// Environment variables.
    pub env: BTreeMap<String, String>,
    /// Paths of device nodes, the same on the host and in the container.
    pub device_nodes: Vec<String>,
    /// Bind mounts.
    pub mounts: Vec<BindMount>,
}

/// A bind mount of a CDI device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BindMount {
    /// Path on the host.
    pub host: String,
    /// Path in the container.
    pub container: String,
    /// Whether the container may write.
    pub is_writable: bool,
}

/// Returns the name of the CDI device of a claim's request. Names are never used again, because claims have a UID.
#[must_use]
pub fn claim_device(claim_uid: &str, request_directory: &str) -> String {
    format!("{claim_uid}-{request_directory}")
}

/// Returns the name of a claim's specification file in a CDI directory.
#[must_use]
pub fn claim_file(claim_uid: &str) -> String {
    format!("{CLAIM_FILE_PREFIX}{claim_uid}.json")
}

/// Start of the names of the specification files of claims. The claim's UID and `.json` follow.
pub const CLAIM_FILE_PREFIX: &str = "tessera.dev-claim-";

/// Writes the specification of a claim.
#[must_use]
pub fn print_claim(devices: &[ContainerEdits]) -> String {
    let device = |edits: &ContainerEdits| {
        let env: Vec<String> = edits.env.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let nodes: Vec<Value> = edits.device_nodes.iter().map(|path| json!({ "path": path })).collect();
        let mounts: Vec<Value> = edits
            .mounts
            .iter()
            .map(|mount| bind(&mount.host, &mount.container, if mount.is_writable { "rw" } else { "ro" }))
            .collect();
        let mut edited = serde_json::Map::new();
        for (key, list) in [("env", json!(env)), ("deviceNodes", json!(nodes)), ("mounts", json!(mounts))] {
            // The specification allows no empty edits of a device, but empty lists may be left out.
            if list.as_array().is_some_and(|list| !list.is_empty()) {
                edited.insert(key.to_owned(), list);
            }
        }
        json!({ "name": edits.name, "containerEdits": edited })
    };
    let devices: Vec<Value> = devices.iter().map(device).collect();
    json!({ "cdiVersion": VERSION, "kind": CLAIM_KIND, "devices": devices }).to_string()
}

fn bind(host: &str, container: &str, access: &str) -> Value {
    json!({ "hostPath": host, "containerPath": container, "options": [access, "nosuid", "nodev", "bind"] })
}

/// Writes the specification with read-only mounts, each from a host path to a container path.
#[must_use]
pub fn print<'a>(mounts: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let mount = |(host, container): (&str, &str)| bind(host, container, "ro");
    let mounts: Vec<Value> = mounts.into_iter().map(mount).collect();
    let (kind, name) = LIBRARY.split_once('=').unwrap_or((LIBRARY, ""));
    let device = json!({ "name": name, "containerEdits": { "mounts": mounts } });
    json!({ "cdiVersion": VERSION, "kind": kind, "devices": [device] }).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_one_device_with_its_mounts() {
        assert_eq!(
            print([("/grants/.library/libtessera.so", "/usr/lib/tessera/libtessera.so")]),
            concat!(
                r#"{"cdiVersion":"0.5.0","devices":[{"containerEdits":{"mounts":[{"containerPath":"/usr/lib/tessera/libtessera.so","#,
                r#""hostPath":"/grants/.library/libtessera.so","options":["ro","nosuid","nodev","bind"]}]},"name":"libtessera"}],"#,
                r#""kind":"tessera.dev/library"}"#
            )
        );
    }

    #[test]
    fn writes_the_devices_of_a_claim() {
        let mount = |host: &str, container: &str, is_writable| BindMount {
            host: host.into(),
            container: container.into(),
            is_writable,
        };
        let edits = ContainerEdits {
            name: claim_device("u-1", "gpu.any"),
            env: [("NVIDIA_VISIBLE_DEVICES".to_owned(), "void".to_owned())].into(),
            device_nodes: vec!["/dev/nvidia0".into()],
            mounts: vec![mount("/g/u-1/gpu.any/account", "/etc/tessera/u-1-gpu.any/account", true)],
        };
        assert_eq!(
            print_claim(&[edits]),
            concat!(
                r#"{"cdiVersion":"0.5.0","devices":[{"containerEdits":{"deviceNodes":[{"path":"/dev/nvidia0"}],"#,
                r#""env":["NVIDIA_VISIBLE_DEVICES=void"],"mounts":[{"containerPath":"/etc/tessera/u-1-gpu.any/account","#,
                r#""hostPath":"/g/u-1/gpu.any/account","options":["rw","nosuid","nodev","bind"]}]},"#,
                r#""name":"u-1-gpu.any"}],"kind":"tessera.dev/claim"}"#
            )
        );
        assert_eq!(claim_file("u-1"), "tessera.dev-claim-u-1.json");
    }
}
