//! How GPUs and the library reach containers: by CDI where the container runtime has it.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use tessera_cluster::node_agent::NodeClient;
use tessera_cluster::with_causes;
use tessera_node::gpus::Gpus;

use super::arguments::{Arguments, Strategy};

/// Directory with CDI specifications that runtimes read in addition to `--cdi-directory`.
const STATIC_DIRECTORY: &str = "/etc/cdi";

/// Runtimes that inject CDI devices by default, each with its first such version. Earlier versions
/// ignore the devices without an error unless they are configured.
const RUNTIMES: [(&str, (u32, u32)); 2] = [("containerd", (2, 0)), ("cri-o", (1, 28))];

/// Reason why GPUs are not passed by CDI.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoCdi {
    #[error("simulated GPUs have no CDI specification")]
    Simulated,
    #[error("the container runtime of the node is unknown: {0}")]
    RuntimeUnknown(String),
    #[error("the container runtime {0} has no CDI by default; containerd 2.0 and CRI-O 1.28 have it")]
    Runtime(String),
    #[error(
        "no CDI specification in {directories} names GPUs of kind {kind} by UUID; `nvidia-ctk cdi generate` writes one"
    )]
    Devices { kind: String, directories: String },
}

/// The parts of a CDI specification that name devices.
#[derive(Debug, Deserialize)]
struct Specification {
    kind: String,
    #[serde(default)]
    devices: Vec<Device>,
}

#[derive(Debug, Deserialize)]
struct Device {
    name: String,
}

/// Decides whether containers receive GPUs and library by CDI. Logs the decision and its reason.
pub(super) async fn uses_cdi(arguments: &Arguments, gpus: &dyn Gpus, node: &NodeClient) -> bool {
    match arguments.device_list_strategy {
        Strategy::Envvar => false,
        Strategy::CdiCri => true,
        Strategy::Auto => {
            let directories = [arguments.cdi_directory.clone(), PathBuf::from(STATIC_DIRECTORY)];
            let found = if gpus.have_device_nodes() {
                let runtime = node.container_runtime().await.map_err(|error| with_causes(&error));
                detect(runtime, &arguments.cdi_kind, &directories)
            } else {
                Err(NoCdi::Simulated)
            };
            match found {
                Ok(()) => {
                    tracing::info!(kind = arguments.cdi_kind, "containers receive GPUs and library by CDI");
                    true
                }
                Err(reason) => {
                    tracing::info!(
                        %reason,
                        "containers receive GPUs by NVIDIA_VISIBLE_DEVICES and the library by mounts"
                    );
                    false
                }
            }
        }
    }
}

/// Returns why GPUs of this kind cannot be passed by CDI, if so.
fn detect(runtime: Result<String, String>, kind: &str, directories: &[PathBuf]) -> Result<(), NoCdi> {
    let runtime = runtime.map_err(NoCdi::RuntimeUnknown)?;
    if !has_cdi(&runtime) {
        return Err(NoCdi::Runtime(runtime));
    }
    let names: BTreeSet<String> =
        directories.iter().flat_map(|directory| device_names(directory, kind)).collect();
    // Containers name GPUs by UUID. Specifications of other device names do not resolve them.
    if names.iter().any(|name| name.starts_with("GPU-")) {
        return Ok(());
    }
    let directories: Vec<String> =
        directories.iter().map(|directory| directory.display().to_string()).collect();
    Err(NoCdi::Devices { kind: kind.to_owned(), directories: directories.join(" and ") })
}

/// Returns whether a runtime, as a node's status names it, injects CDI devices by default.
fn has_cdi(runtime: &str) -> bool {
    let version = || {
        let (name, version) = runtime.split_once("://")?;
        let mut numbers = version.trim_start_matches('v').split('.');
        let mut next = || numbers.next()?.parse::<u32>().ok();
        Some((name, (next()?, next()?)))
    };
    version().is_some_and(|(name, version)| {
        RUNTIMES.iter().any(|(known, first)| name == *known && version >= *first)
    })
}

/// Returns the names of the devices of a kind in the specifications of a directory. Files that are
/// not specifications are skipped, as runtimes do.
fn device_names(directory: &Path, kind: &str) -> Vec<String> {
    let files = fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_specification = |path: &PathBuf| {
        path.extension()
            .is_some_and(|extension| ["json", "yaml", "yml"].iter().any(|known| extension == *known))
    };
    let texts = files.filter(is_specification).filter_map(|path| fs::read_to_string(path).ok());
    let specifications = texts.filter_map(|text| serde_saphyr::from_str::<Specification>(&text).ok());
    let of_kind = specifications.filter(|specification| specification.kind == kind);
    of_kind.flat_map(|specification| specification.devices).map(|device| device.name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: &str = "nvidia.com/gpu";

    #[test]
    fn runtimes_with_cdi_are_known_by_their_version() {
        for runtime in ["containerd://2.0.0", "containerd://2.1.4-k3s1", "cri-o://1.28.0", "cri-o://1.34.1"] {
            assert!(has_cdi(runtime), "{runtime}");
        }
        for runtime in
            ["containerd://1.7.27", "cri-o://1.27.9", "docker://27.1.1", "containerd://", "2.0.0", ""]
        {
            assert!(!has_cdi(runtime), "{runtime}");
        }
    }

    #[test]
    fn cdi_is_used_only_where_the_runtime_and_the_specification_have_the_gpus() {
        let folder = tempfile::tempdir().unwrap();
        let directories = [folder.path().join("run"), folder.path().join("etc")];
        fs::create_dir_all(&directories[1]).unwrap();
        let found = |runtime: &str| {
            detect(Ok(runtime.to_owned()), KIND, &directories).map_err(|reason| reason.to_string())
        };
        let write = |name: &str, text: &str| fs::write(directories[1].join(name), text).unwrap();
        let missing = "names GPUs of kind nvidia.com/gpu by UUID; `nvidia-ctk cdi generate` writes one";
        assert!(found("containerd://2.0.0").unwrap_err().ends_with(missing));
        write("broken.yaml", "kind: [");
        write("other.json", r#"{"kind":"tessera.dev/library","devices":[{"name":"GPU-1"}]}"#);
        write(
            "by-index.yaml",
            "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: \"0\"\n- name: all\n",
        );
        assert!(found("containerd://2.0.0").unwrap_err().ends_with(missing));
        write("nvidia.yaml", "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: GPU-8f2a61c0\n");
        assert_eq!(found("containerd://2.0.0"), Ok(()));
        let old = "the container runtime containerd://1.7.27 has no CDI by default; containerd 2.0 and CRI-O 1.28 have it";
        assert_eq!(found("containerd://1.7.27").unwrap_err(), old);
        let unknown = detect(Err("no answer".to_owned()), KIND, &directories).unwrap_err().to_string();
        assert_eq!(unknown, "the container runtime of the node is unknown: no answer");
    }
}
