//! Leader election among several replicas with a Lease object.

mod election;
mod neighbour;
mod timing;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};

use crate::causes::innermost;

pub use self::{
    election::{Election, LeaseRecord, LeaseStep},
    neighbour::{NeighbourLease, Turn, turn},
    timing::LeaseTiming,
};

/// Reason why the lease could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// The API server rejected the request.
    #[error("{}", innermost(.0))]
    Api(Box<kube::Error>),
    /// The API server did not answer before the timeout.
    #[error("the API server did not answer about the lease in time")]
    Timeout,
}

/// A replica that tries to hold a Lease object.
#[derive(Debug)]
pub struct Candidate {
    api: Api<Lease>,
    name: String,
    election: Election,
    started: Instant,
    annotations: BTreeMap<String, String>,
    /// The annotations of the lease when it was last read.
    found_annotations: BTreeMap<String, String>,
    /// The lease as this replica wrote it last. Empty after a failed write.
    written: Option<Written>,
}

/// What the next write of the lease needs from the last one.
#[derive(Debug)]
struct Written {
    version: Option<String>,
    transitions: i32,
}

impl Candidate {
    /// Returns a candidate for the lease `namespace/name`.
    #[must_use]
    pub fn new(client: Client, namespace: &str, name: &str, identity: String, timing: LeaseTiming) -> Self {
        let api = Api::namespaced(client, namespace);
        let election = Election::new(identity, timing);
        Self {
            api,
            name: name.to_owned(),
            election,
            started: Instant::now(),
            annotations: BTreeMap::new(),
            found_annotations: BTreeMap::new(),
            written: None,
        }
    }

    /// Returns the same candidate, which publishes `annotations` on the lease while it leads.
    #[must_use]
    pub fn with_annotations(mut self, annotations: BTreeMap<String, String>) -> Self {
        self.annotations = annotations;
        self
    }

    /// Renews the lease, or reads it and takes it if due. Returns whether this replica leads now.
    pub async fn poll(&mut self) -> Result<bool, LeaseError> {
        // The leader need not read the lease: the write fails if another replica has written it.
        let written = self.written.take().filter(|_| self.leads());
        if let Some(Written { version, transitions }) = written
            && self.write(version, transitions).await?
        {
            return Ok(self.leads());
        }
        let found = self.get().await?;
        let transitions =
            found.as_ref().and_then(|lease| lease.spec.as_ref()?.lease_transitions).unwrap_or(0);
        let read = found.as_ref().map(read);
        let is_ours = read.as_ref().is_some_and(|found| found.holder == self.election.identity());
        if let LeaseStep::Take(version) = self.election.observe(self.now(), read) {
            let transitions = if is_ours { transitions } else { transitions.saturating_add(1) };
            self.write(version, transitions).await?;
        }
        Ok(self.leads())
    }

    /// Reads the lease without taking it, so that an expired one can be taken at once when this replica competes.
    pub async fn observe(&mut self) -> Result<(), LeaseError> {
        let found = self.get().await?;
        self.election.observe(self.now(), found.as_ref().map(read));
        Ok(())
    }

    async fn get(&mut self) -> Result<Option<Lease>, LeaseError> {
        let begun = self.now();
        let found = self.with_timeout(self.api.get_opt(&self.name)).await;
        self.election.record_latency(self.now() - begun);
        let found = found?;
        let annotations = found.as_ref().and_then(|lease| lease.metadata.annotations.clone());
        self.found_annotations = annotations.unwrap_or_default();
        Ok(found)
    }

    /// Writes the lease if it still has this version, or creates it if there is no version. Returns
    /// false if another replica wrote first or the lease was deleted.
    async fn write(&mut self, version: Option<String>, transitions: i32) -> Result<bool, LeaseError> {
        let begun = self.now();
        let duration = self.election.next_duration();
        let lease = self.lease(self.election.identity(), duration, version.clone(), transitions);
        let post = PostParams::default();
        let written = match version {
            None => self.with_timeout(self.api.create(&post, &lease)).await,
            Some(_) => self.with_timeout(self.api.replace(&self.name, &post, &lease)).await,
        };
        self.election.record_latency(self.now() - begun);
        match written {
            Ok(lease) => {
                self.election.record_write(begun, duration);
                self.written = Some(Written { version: lease.metadata.resource_version, transitions });
                Ok(true)
            }
            Err(LeaseError::Api(error)) if matches!(&*error, kube::Error::Api(status) if matches!(status.code, 404 | 409)) => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Returns whether this replica leads now.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.election.leads(self.now())
    }

    /// Returns a number that grows when this replica starts to lead after another one may have led.
    #[must_use]
    pub fn term(&self) -> u64 {
        self.election.term()
    }

    /// Returns the other replica that held the lease when it was last read.
    #[must_use]
    pub fn other_leader(&self) -> Option<&str> {
        self.election.other_holder()
    }

    /// Returns what the leader published under this key when the lease was last read.
    #[must_use]
    pub fn published(&self, key: &str) -> Option<&str> {
        self.found_annotations.get(key).map(String::as_str)
    }

    /// Returns the time since the last renewal and the timing that counts from there on, or `None` if
    /// this replica does not hold the lease.
    #[must_use]
    pub fn held(&self) -> Option<(Duration, LeaseTiming)> {
        self.election.held(self.now())
    }

    /// Returns the time until the next poll.
    #[must_use]
    pub fn next_poll(&self) -> Duration {
        self.election.next_poll(self.now())
    }

    /// Returns the timing of the election.
    #[must_use]
    pub fn timing(&self) -> LeaseTiming {
        self.election.timing()
    }

    /// Releases the lease, so that another replica need not wait until it expires.
    pub async fn resign(&mut self) -> Result<(), LeaseError> {
        let is_leading = self.leads();
        self.election.resign();
        if !is_leading {
            return Ok(());
        }
        let found = self.with_timeout(self.api.get_opt(&self.name)).await?;
        let Some(found) = found.filter(|lease| read(lease).holder == self.election.identity()) else {
            return Ok(());
        };
        let duration = self.election.next_duration();
        let lease = self.lease("", duration, found.metadata.resource_version, 0);
        self.with_timeout(self.api.replace(&self.name, &PostParams::default(), &lease)).await?;
        Ok(())
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn lease(&self, holder: &str, duration: Duration, version: Option<String>, transitions: i32) -> Lease {
        let now = MicroTime(Timestamp::now());
        let duration = i32::try_from(duration.as_secs()).unwrap_or(i32::MAX);
        Lease {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                resource_version: version,
                annotations: (!self.annotations.is_empty()).then(|| self.annotations.clone()),
                ..ObjectMeta::default()
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(holder.to_owned()),
                lease_duration_seconds: Some(duration.max(1)),
                renew_time: Some(now.clone()),
                acquire_time: Some(now),
                lease_transitions: Some(transitions),
                ..LeaseSpec::default()
            }),
        }
    }

    async fn with_timeout<T>(
        &self,
        call: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, LeaseError> {
        match tokio::time::timeout(self.election.request_timeout(), call).await {
            Ok(outcome) => outcome.map_err(|error| LeaseError::Api(Box::new(error))),
            Err(_) => Err(LeaseError::Timeout),
        }
    }
}

fn read(lease: &Lease) -> LeaseRecord {
    let spec = lease.spec.clone().unwrap_or_default();
    let seconds = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
    LeaseRecord {
        holder: spec.holder_identity.unwrap_or_default(),
        version: lease.metadata.resource_version.clone().unwrap_or_default(),
        duration: Duration::from_secs(seconds.unwrap_or(15)),
    }
}
