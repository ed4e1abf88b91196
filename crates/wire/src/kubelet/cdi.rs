//! The description by which a container runtime brings our library into containers (Container Device Interface).

use serde_json::{Value, json};

/// The name of the library among CDI devices.
pub const LIBRARY: &str = "tessera.dev/library=libtessera";

/// The file's name in a directory of descriptions, such as `/var/run/cdi`.
pub const FILE: &str = "tessera.dev-library.json";

/// The description: files that can be read, from node to container.
#[must_use]
pub fn print<'a>(mounts: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let mount = |(host, container): (&str, &str)| -> Value {
        json!({ "hostPath": host, "containerPath": container, "options": ["ro", "nosuid", "nodev", "bind"] })
    };
    let mounts: Vec<Value> = mounts.into_iter().map(mount).collect();
    let (kind, name) = LIBRARY.split_once('=').unwrap_or((LIBRARY, ""));
    let device = json!({ "name": name, "containerEdits": { "mounts": mounts } });
    // 0.5.0 is what containerd 1.7 reads; nothing newer is needed.
    json!({ "cdiVersion": "0.5.0", "kind": kind, "devices": [device] }).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_device_with_its_mounts() {
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
