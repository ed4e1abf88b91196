//! The CDI specification (Container Device Interface) with which a container runtime mounts
//! `libtessera.so` into containers.

use serde_json::{Value, json};

/// Qualified CDI device name of the library.
pub const LIBRARY: &str = "tessera.dev/library=libtessera";

/// Name of the specification file in a CDI directory such as `/var/run/cdi`.
pub const FILE: &str = "tessera.dev-library.json";

/// Writes the specification with read-only mounts, each from a host path to a container path.
#[must_use]
pub fn print<'a>(mounts: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let mount = |(host, container): (&str, &str)| -> Value {
        json!({ "hostPath": host, "containerPath": container, "options": ["ro", "nosuid", "nodev", "bind"] })
    };
    let mounts: Vec<Value> = mounts.into_iter().map(mount).collect();
    let (kind, name) = LIBRARY.split_once('=').unwrap_or((LIBRARY, ""));
    let device = json!({ "name": name, "containerEdits": { "mounts": mounts } });
    // containerd 1.7 reads version 0.5.0, and the specification uses no newer field.
    json!({ "cdiVersion": "0.5.0", "kind": kind, "devices": [device] }).to_string()
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
}
