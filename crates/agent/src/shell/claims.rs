//! The driver of claims: forwards the kubelet's calls to the controller, and keeps the files of claims.
//!
//! ```text
//! <grants>/.claims/<claim UID>.json                 record of a prepared claim, on the node's disk
//! <grants>/<claim UID>/<request>/                   grant of a request, like that of a container
//! <CDI directory>/tessera.dev-claim-<UID>.json      CDI devices of the claim
//! ```
//!
//! The record is written first and removed last, so that an interrupted change is repeated.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use tessera_cluster::with_causes;
use tessera_core::units::PodUid;
use tessera_limits::GpuLimit;
use tessera_node::dra::{
    ClaimDriver, ClaimReference, ClaimRefusal, DeviceHealth, PreparedDevice, ServedDriver, serve,
};
use tessera_wire::{
    kubelet::cdi,
    tessera::dra::{DRIVER, PreparedClaim},
};
use tokio::sync::watch;

use super::{
    Cluster, Messages, ServedClaims, Shell, TICK_INTERVAL,
    plugin::{WRONG_ANSWER, ask},
};
use crate::controller::{CallAnswer, ClaimFiles, Event, ShellError};

/// Directory of the records, which is no pod's.
const RECORDS: &str = ".claims";

/// Forwards the kubelet's calls about claims to the controller.
pub(super) struct ClaimService {
    health: watch::Sender<Vec<DeviceHealth>>,
    messages: Messages,
}

impl ClaimService {
    pub(super) fn new(messages: Messages) -> Self {
        Self { health: watch::Sender::new(Vec::new()), messages }
    }
}

impl ClaimDriver for ClaimService {
    fn health(&self) -> watch::Receiver<Vec<DeviceHealth>> {
        self.health.subscribe()
    }

    async fn prepare(&self, claim: ClaimReference) -> Result<Vec<PreparedDevice>, ClaimRefusal> {
        match ask(&self.messages, |call| Event::PrepareClaim(call, claim)).await.map_err(ClaimRefusal)? {
            CallAnswer::Prepared(answer) => answer.map_err(|error| ClaimRefusal(error.to_string())),
            _ => Err(ClaimRefusal(WRONG_ANSWER.to_owned())),
        }
    }

    async fn unprepare(&self, claim: ClaimReference) -> Result<(), ClaimRefusal> {
        match ask(&self.messages, |call| Event::UnprepareClaim(call, claim)).await.map_err(ClaimRefusal)? {
            CallAnswer::Unprepared(answer) => answer.map_err(|error| ClaimRefusal(error.to_string())),
            _ => Err(ClaimRefusal(WRONG_ANSWER.to_owned())),
        }
    }
}

/// The records and CDI devices of claims.
#[derive(Debug)]
pub(super) struct ClaimStore {
    records: PathBuf,
    cdi_directory: PathBuf,
}

impl ClaimStore {
    /// Opens or creates the directories.
    pub(super) fn at(grants: &Path, cdi_directory: PathBuf) -> io::Result<Self> {
        let records = grants.join(RECORDS);
        fs::create_dir_all(&records)?;
        fs::create_dir_all(&cdi_directory)?;
        Ok(Self { records, cdi_directory })
    }

    /// Reads all records, and removes CDI devices of claims without a record.
    pub(super) fn read(&self) -> Vec<PreparedClaim> {
        let mut claims = Vec::new();
        for path in files_in(&self.records).filter(|path| path.extension().is_some_and(|end| end == "json")) {
            let text = fs::read_to_string(&path).map_err(|error| error.to_string());
            match text.and_then(|text| PreparedClaim::parse(&text).map_err(|error| error.to_string())) {
                Ok(claim) if record_name(&claim.uid).is_ok_and(|name| path.ends_with(name)) => {
                    claims.push(claim)
                }
                Ok(_) => {
                    tracing::warn!(record = %path.display(), "the record of a claim has another claim's name; it is ignored");
                }
                Err(error) => {
                    tracing::warn!(record = %path.display(), %error, "cannot read the record of a claim; containers that use the claim fail");
                }
            }
        }
        for path in files_in(&self.cdi_directory) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let is_known = claims.iter().any(|claim: &PreparedClaim| cdi::claim_file(&claim.uid) == name);
            if name.starts_with(cdi::CLAIM_FILE_PREFIX) && !is_known {
                let _removed_by_another = fs::remove_file(path);
            }
        }
        claims
    }

    fn write_record(&self, claim: &PreparedClaim) -> io::Result<()> {
        replace(&self.records.join(record_name(&claim.uid)?), &claim.print())
    }

    fn write_devices(&self, files: &ClaimFiles) -> io::Result<()> {
        let path = self.cdi_directory.join(cdi::claim_file(&files.claim.uid));
        // The directory is in memory, and a restart of the node has removed it.
        fs::create_dir_all(&self.cdi_directory)?;
        replace(&path, &cdi::print_claim(&files.edits))
    }

    fn remove_devices(&self, uid: &str) -> io::Result<()> {
        record_name(uid)?;
        remove(&self.cdi_directory.join(cdi::claim_file(uid)))
    }

    fn remove_record(&self, uid: &str) -> io::Result<()> {
        remove(&self.records.join(record_name(uid)?))
    }
}

/// Returns the name of a claim's record. A UID must be a single path component.
fn record_name(uid: &str) -> io::Result<String> {
    if uid.is_empty() || uid.starts_with('.') || uid.contains('/') {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{uid:?} is not the UID of a claim"),
        ));
    }
    Ok(format!("{uid}.json"))
}

fn files_in(directory: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// Writes a file atomically. A runtime or a later agent never sees a part of it.
fn replace(path: &Path, content: &str) -> io::Result<()> {
    let temporary = path.with_extension("new");
    fs::write(&temporary, content)?;
    fs::rename(&temporary, path)
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl<C: Cluster> Shell<C> {
    /// Sends the health of the devices to the kubelet. The driver is served from the first call on.
    pub(super) fn publish_claim_health(&mut self, health: Vec<DeviceHealth>) {
        let Some(ServedClaims { service, settings, is_served, .. }) = &mut self.claims else { return };
        service.health.send_replace(health);
        if std::mem::replace(is_served, true) {
            return;
        }
        let (service, settings, stop) = (Arc::clone(service), settings.clone(), self.stop.clone());
        self.tasks.spawn(async move {
            while !stop.is_cancelled() {
                let served = ServedDriver {
                    driver: service.clone(),
                    name: DRIVER.to_owned(),
                    registry: settings.registry.clone(),
                    plugins: settings.plugins.clone(),
                };
                if let Err(error) = serve(served, stop.clone()).await {
                    // The kubelet may create the directory later.
                    let error = with_causes(&error);
                    tracing::warn!(%error, "the kubelet cannot find the driver of claims; will retry");
                    let _stopped = stop.run_until_cancelled(tokio::time::sleep(TICK_INTERVAL)).await;
                }
            }
        });
    }

    /// Writes the files of a claim: first its record, last the devices with which containers start.
    pub(super) fn store_claim(&self, files: &ClaimFiles) -> Result<(), ShellError> {
        let Some(ServedClaims { store, .. }) = &self.claims else { return Ok(()) };
        let failed = |error: io::Error| ShellError::GrantFile(error.to_string());
        store.write_record(&files.claim).map_err(failed)?;
        for limits in &files.limits {
            self.grants.ensure(limits).map_err(failed)?;
            // Nothing limits a request with whole GPUs.
            if limits.gpus.iter().any(|gpu| gpu.memory != GpuLimit::WHOLE) {
                self.add_grant(limits);
            }
        }
        store.write_devices(files).map_err(failed)
    }

    /// Removes the files of a claim, the record last.
    pub(super) fn remove_claim(&mut self, uid: &str) -> Result<(), ShellError> {
        let Some(ServedClaims { store, .. }) = &self.claims else { return Ok(()) };
        let failed = |error: io::Error| ShellError::GrantFile(error.to_string());
        store.remove_devices(uid).map_err(failed)?;
        for directory in self.grants.remove(&PodUid(uid.to_owned())) {
            self.arbiter.remove(directory.clone());
            self.accounts.remove(directory);
        }
        store.remove_record(uid).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use tessera_core::grant::Hold;
    use tessera_wire::{kubelet::cdi::ContainerEdits, tessera::dra::PreparedGpu};

    use super::*;

    fn files(uid: &str) -> ClaimFiles {
        let gpu = PreparedGpu {
            request: "gpu".into(),
            device: "gpu-0".into(),
            gpu: "GPU-0".into(),
            hold: Some(Hold::Whole),
            cores_limit: None,
            share_id: None,
        };
        let claim =
            PreparedClaim { uid: uid.into(), namespace: "team".into(), name: "c".into(), devices: vec![gpu] };
        let edits = vec![ContainerEdits { name: cdi::claim_device(uid, "gpu"), ..ContainerEdits::default() }];
        ClaimFiles { claim, limits: Vec::new(), edits }
    }

    #[test]
    fn a_later_agent_reads_the_records_and_removes_devices_without_one() {
        let folder = tempfile::tempdir().unwrap();
        let cdi_directory = folder.path().join("cdi");
        let store = ClaimStore::at(&folder.path().join("grants"), cdi_directory.clone()).unwrap();
        for uid in ["one", "two"] {
            store.write_record(&files(uid).claim).unwrap();
            store.write_devices(&files(uid)).unwrap();
        }
        store.write_devices(&files("orphan")).unwrap();
        fs::write(cdi_directory.join("nvidia.json"), "{}").unwrap();
        fs::write(store.records.join("damaged.json"), "{").unwrap();
        fs::write(store.records.join("other.json"), files("one").claim.print()).unwrap();
        let mut uids: Vec<String> = store.read().into_iter().map(|claim| claim.uid).collect();
        uids.sort();
        assert_eq!(uids, ["one", "two"]);
        let mut left: Vec<String> = files_in(&cdi_directory)
            .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
            .collect();
        left.sort();
        assert_eq!(left, ["nvidia.json", "tessera.dev-claim-one.json", "tessera.dev-claim-two.json"]);
        // A restart of the node empties the CDI directory.
        fs::remove_dir_all(&cdi_directory).unwrap();
        store.write_devices(&files("one")).unwrap();
        store.remove_devices("one").unwrap();
        store.remove_record("one").unwrap();
        store.remove_record("one").unwrap();
        assert_eq!(store.read().len(), 1);
        assert!(store.write_record(&files("../one").claim).is_err());
    }
}
