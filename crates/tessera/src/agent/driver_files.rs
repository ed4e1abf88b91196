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
