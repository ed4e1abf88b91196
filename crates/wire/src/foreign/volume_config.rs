//! Configuration files of gpu-manager: `volume.conf`, which lists the driver's files for containers,
//! and the extra configuration with more devices.

use serde::Deserialize;

/// `volume.conf`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct VolumeConfig {
    /// Directories to fill.
    #[serde(default, rename = "volume")]
    pub volumes: Vec<Volume>,
}

/// A directory with files of the driver.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Volume {
    /// Name of the directory. Containers with shares get the one named `nvidia`, containers with whole
    /// GPUs another one if there is one.
    pub name: String,
    /// Directory above it.
    pub base: String,
    /// Files in it.
    #[serde(default)]
    pub components: Components,
}

/// Files of the driver, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Components {
    /// Programs, such as `nvidia-smi`.
    #[serde(default)]
    pub binaries: Vec<String>,
    /// Libraries without version, such as `libcuda.so`.
    #[serde(default)]
    pub libraries: Vec<String>,
}

/// Programs of the driver for compute and monitoring.
const BINARIES: &[&str] = &[
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-smi",
];

/// Libraries of the driver.
const LIBRARIES: &[&str] = &[
    "libcuda.so",
    "libcudadebugger.so",
    "libnvcuvid.so",
    "libnvidia-allocator.so",
    "libnvidia-cfg.so",
    "libnvidia-compiler.so",
    "libnvidia-eglcore.so",
    "libnvidia-encode.so",
    "libnvidia-fbc.so",
    "libnvidia-glcore.so",
    "libnvidia-glsi.so",
    "libnvidia-glvkspirv.so",
    "libnvidia-gpucomp.so",
    "libnvidia-ml.so",
    "libnvidia-nvvm.so",
    "libnvidia-opencl.so",
    "libnvidia-opticalflow.so",
    "libnvidia-pkcs11.so",
    "libnvidia-ptxjitcompiler.so",
    "libnvidia-rtcore.so",
    "libnvidia-sandboxutils.so",
    "libnvidia-tls.so",
    "libnvoptix.so",
    "libEGL_nvidia.so",
    "libGLESv1_CM_nvidia.so",
    "libGLESv2_nvidia.so",
    "libGLX_nvidia.so",
];

impl Components {
    /// Returns the files that containers get without a `volume.conf`.
    #[must_use]
    pub fn of_driver() -> Self {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Self { binaries: names(BINARIES), libraries: names(LIBRARIES) }
    }
}

/// An invalid configuration file.
#[derive(Debug, thiserror::Error)]
pub enum InvalidConfig {
    /// The text is not JSON of the expected form.
    #[error("not the JSON of gpu-manager")]
    Json(#[from] serde_json::Error),
    /// A volume is not a directory below its base.
    #[error("volume {0:?} has no absolute base, or its name is not a single directory name")]
    Directory(String),
    /// No volume is listed.
    #[error("it lists no volume")]
    Empty,
}

/// Parses `volume.conf`.
///
/// # Errors
/// [`InvalidConfig`] if the text has another form.
pub fn parse(text: &str) -> Result<VolumeConfig, InvalidConfig> {
    let config: VolumeConfig = serde_json::from_str(text)?;
    for volume in &config.volumes {
        let is_name = !matches!(volume.name.as_str(), "" | "." | "..") && !volume.name.contains('/');
        let is_base = volume.base.starts_with('/') && volume.base.split('/').all(|part| part != "..");
        if !is_name || !is_base {
            return Err(InvalidConfig::Directory(volume.name.clone()));
        }
    }
    if config.volumes.is_empty() { Err(InvalidConfig::Empty) } else { Ok(config) }
}

/// Returns the devices of the entry `default` of gpu-manager's extra configuration, which containers
/// get in addition.
///
/// # Errors
/// [`InvalidConfig`] if the text has another form.
pub fn parse_extra_devices(text: &str) -> Result<Vec<String>, InvalidConfig> {
    #[derive(Deserialize)]
    struct Extra {
        #[serde(default)]
        devices: Vec<String>,
    }
    let mut entries: std::collections::BTreeMap<String, Extra> = serde_json::from_str(text)?;
    Ok(entries.remove("default").map(|extra| extra.devices).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_a_volume_config() {
        let text = r#"{"volume":[{"name":"nvidia","mode":"","base":"/etc/gpu-manager/vdriver",
            "components":{"binaries":["nvidia-smi"],"libraries":["libcuda.so"]}},{"name":"origin","base":"/b"}]}"#;
        let config = parse(text).unwrap();
        assert_eq!(config.volumes[0].components.libraries, ["libcuda.so"]);
        assert_eq!(
            (config.volumes[1].name.as_str(), &config.volumes[1].components),
            ("origin", &Components::default())
        );
    }

    #[test]
    fn reports_invalid_configs() {
        for text in [
            "",
            "[]",
            "{}",
            r#"{"volume":[]}"#,
            r#"{"volume":[{"name":"a/b","base":"/x"}]}"#,
            r#"{"volume":[{"name":"..","base":"/x"}]}"#,
            r#"{"volume":[{"name":".","base":"/x"}]}"#,
            r#"{"volume":[{"name":"a","base":"/x/../y"}]}"#,
            r#"{"volume":[{"name":"a","base":"x"}]}"#,
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn parses_extra_devices() {
        let text = r#"{"default":{"devices":["/dev/infiniband/uverbs0"]},"other":{"devices":["/dev/x"]}}"#;
        assert_eq!(parse_extra_devices(text).unwrap(), ["/dev/infiniband/uverbs0"]);
        assert_eq!(parse_extra_devices("{}").unwrap(), <[String; 0]>::default());
        assert!(parse_extra_devices("x").is_err());
    }
}
