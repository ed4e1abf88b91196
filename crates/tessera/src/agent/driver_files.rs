//! The driver directories that containers mount, as the flags describe them.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use tessera_node::driver_volume::{self, Filled};
use tessera_wire::foreign::volume_config::{self, Components};
use tessera_wire::kubelet::container_response::InjectionSettings;
use tokio_util::sync::CancellationToken;

use super::arguments::Arguments;

/// Directory that the agent fills if no flag names another one.
const DEFAULT_DIRECTORY: &str = "/var/lib/tessera/driver";

/// Name of the volume for containers with shares.
const SHARES: &str = "nvidia";

/// Time between two comparisons of the directories with the driver.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// Driver directories that the agent fills.
#[derive(Clone, Debug)]
pub(super) struct DriverFiles {
    root: PathBuf,
    volumes: Vec<(PathBuf, Components)>,
}

impl DriverFiles {
    /// Returns the directories to fill, and adds all driver files to the settings of containers.
    pub(super) fn new(arguments: &Arguments, injection: &mut InjectionSettings) -> Result<Self> {
        injection.driver_directory.clone_from(&arguments.driver_directory);
        if let Some(file) = &arguments.extra_config {
            let devices = volume_config::parse_extra_devices(&read(file)?);
            injection.extra_devices =
                devices.with_context(|| format!("--extra-config {}", file.display()))?;
        }
        let root = arguments.driver_root.clone();
        injection.is_plain_runtime = root.is_some();
        let mut volumes = Vec::new();
        if let Some(file) = &arguments.volume_config {
            let config = volume_config::parse(&read(file)?);
            let config = config.with_context(|| format!("--volume-config {}", file.display()))?;
            for volume in config.volumes {
                let directory = Path::new(&volume.base).join(&volume.name);
                let mounted = Some(directory.display().to_string());
                if volume.name == SHARES {
                    injection.driver_directory = mounted;
                } else {
                    injection.driver_directory_of_whole_gpus = mounted;
                }
                volumes.push((directory, volume.components));
            }
            if injection.driver_directory.is_none() {
                injection.driver_directory = injection.driver_directory_of_whole_gpus.take();
            }
        } else if root.is_some() {
            let directory = injection.driver_directory.get_or_insert_with(|| DEFAULT_DIRECTORY.to_owned());
            volumes.push((PathBuf::from(&*directory), Components::of_driver()));
        }
        Ok(Self { root: root.unwrap_or_else(|| "/".into()), volumes })
    }

    /// Returns the directory in which this process finds NVML if it is nowhere else.
    pub(super) fn libraries(&self) -> Option<PathBuf> {
        self.volumes.first().map(|(directory, _)| directory.join("lib64"))
    }

    /// Fills the directories, and again whenever the driver has changed, until `stop`. Returns after the
    /// first time.
    pub(super) async fn keep_filled(self, stop: CancellationToken) {
        if self.volumes.is_empty() {
            return;
        }
        let mut before = self.fill_all(Vec::new()).await;
        tokio::spawn(async move {
            let wait = || tokio::time::sleep(CHECK_INTERVAL);
            while stop.run_until_cancelled(wait()).await.is_some() {
                before = self.fill_all(before).await;
            }
        });
    }

    /// Fills all directories. Returns the errors. Errors that were known before are not logged again.
    async fn fill_all(&self, before: Vec<String>) -> Vec<String> {
        let mut errors = Vec::new();
        for (directory, components) in self.volumes.clone() {
            let (root, target) = (self.root.clone(), directory.clone());
            let filled =
                tokio::task::spawn_blocking(move || driver_volume::fill(&root, &target, &components)).await;
            match filled {
                Ok(Ok(Filled::Unchanged)) => {}
                Ok(Ok(Filled::Replaced { files, copied, missing })) => {
                    let missing = missing.join(" ");
                    tracing::info!(directory = %directory.display(), files, copied, missing, "filled the driver directory");
                }
                Ok(Err(error)) => errors.push(format!("{}: {error}", directory.display())),
                Err(error) => errors.push(format!("{}: {error}", directory.display())),
            }
        }
        for error in errors.iter().filter(|error| !before.contains(error)) {
            tracing::error!(error, "cannot fill a driver directory; containers get the files that it has");
        }
        errors
    }
}

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct CommandLine {
        #[command(flatten)]
        agent: Arguments,
    }

    fn read_flags(flags: &[&str]) -> Result<(DriverFiles, InjectionSettings)> {
        let line = CommandLine::try_parse_from([&["tessera", "--node-name", "n"], flags].concat())?;
        let mut injection = InjectionSettings::default();
        Ok((DriverFiles::new(&line.agent, &mut injection)?, injection))
    }

    /// gpu-manager has one directory for containers with shares and another one for whole GPUs.
    #[test]
    fn the_files_of_gpu_manager_name_directories_and_devices() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let file = folder.path().join(name);
            fs::write(&file, text).unwrap();
            file.display().to_string()
        };
        let volume = |name: &str| {
            let components = r#"{"binaries": ["nvidia-smi"], "libraries": ["libcuda.so"]}"#;
            format!(r#"{{"name": "{name}", "base": "/v", "mode": "ro", "components": {components}}}"#)
        };
        let both =
            file("both.conf", &format!(r#"{{"volume": [{}, {}]}}"#, volume("nvidia"), volume("origin")));
        let extra = file("extra.json", r#"{"default": {"devices": ["/dev/infiniband/uverbs0"]}}"#);
        let flags = ["--volume-config", &both, "--extra-config", &extra, "--driver-root", "/host"];
        let (files, injection) = read_flags(&flags).unwrap();
        assert_eq!(injection.driver_directory.as_deref(), Some("/v/nvidia"));
        assert_eq!(injection.driver_directory_of_whole_gpus.as_deref(), Some("/v/origin"));
        assert_eq!(injection.extra_devices, ["/dev/infiniband/uverbs0"]);
        assert!(injection.is_plain_runtime);
        assert_eq!(files.root, Path::new("/host"));
        let filled: Vec<&Path> = files.volumes.iter().map(|(directory, _)| directory.as_path()).collect();
        assert_eq!(filled, [Path::new("/v/nvidia"), Path::new("/v/origin")]);
        for (_, components) in &files.volumes {
            assert_eq!(components.binaries, ["nvidia-smi"]);
            assert_eq!(components.libraries, ["libcuda.so"]);
        }

        let one = file("one.conf", &format!(r#"{{"volume": [{}]}}"#, volume("origin")));
        let (_, injection) = read_flags(&["--volume-config", &one]).unwrap();
        assert_eq!(injection.driver_directory.as_deref(), Some("/v/origin"), "the only one is for all");
        let wrong = file("wrong.conf", "{");
        for flag in ["--volume-config", "--extra-config"] {
            let error = format!("{:#}", read_flags(&[flag, &wrong]).unwrap_err());
            assert!(error.contains(flag) && error.contains(&wrong), "{error}");
        }
    }

    #[test]
    fn without_these_files_the_agent_fills_one_directory_for_a_host_root_only() {
        let (files, injection) = read_flags(&["--driver-root", "/host"]).unwrap();
        assert_eq!(injection.driver_directory.as_deref(), Some(DEFAULT_DIRECTORY));
        assert_eq!(files.volumes.len(), 1);
        let (files, injection) = read_flags(&[]).unwrap();
        assert_eq!((injection.driver_directory, files.volumes.len()), (None, 0));
    }
}
