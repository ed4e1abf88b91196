//! Leader election among several replicas with a Lease object.

mod election;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};

use crate::causes::innermost;

pub use self::election::{Election, LeaseRecord, LeaseStep, LeaseTiming};

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
}

impl Candidate {
    /// Returns a candidate for the lease `namespace/name`.
    #[must_use]
    pub fn new(client: Client, namespace: &str, name: &str, identity: String, timing: LeaseTiming) -> Self {
        let api = Api::namespaced(client, namespace);
        let election = Election::new(identity, timing);
        Self { api, name: name.to_owned(), election, started: Instant::now(), annotations: BTreeMap::new() }
    }

    /// Returns the same candidate, which publishes `annotations` on the lease while it leads.
    #[must_use]
    pub fn with_annotations(mut self, annotations: BTreeMap<String, String>) -> Self {
        self.annotations = annotations;
        self
    }

    /// Reads the lease and takes or renews it if due. Returns whether this replica leads now.
    pub async fn poll(&mut self) -> Result<bool, LeaseError> {
        let begun = self.now();
        let found = self.with_timeout(self.api.get_opt(&self.name)).await?;
        let transitions =
            found.as_ref().and_then(|lease| lease.spec.as_ref()?.lease_transitions).unwrap_or(0);
        let read = found.as_ref().map(read);
        let is_ours = read.as_ref().is_some_and(|found| found.holder == self.election.identity());
        if let LeaseStep::Take(version) = self.election.observe(begun, read) {
            let transitions = if is_ours { transitions } else { transitions.saturating_add(1) };
            let lease = self.lease(self.election.identity(), version.clone(), transitions);
            let post = PostParams::default();
            let written = match version {
                None => self.with_timeout(self.api.create(&post, &lease)).await,
                Some(_) => self.with_timeout(self.api.replace(&self.name, &post, &lease)).await,
            };
            match written {
                Ok(_) => self.election.record_write(begun),
                // Another replica wrote first. The next poll reads the lease again.
                Err(LeaseError::Api(error)) if matches!(&*error, kube::Error::Api(status) if status.code == 409) =>
                    {}
                Err(error) => return Err(error),
            }
        }
        Ok(self.leads())
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

    /// Returns the timing of the election.
    #[must_use]
    pub fn timing(&self) -> LeaseTiming {
        self.election.timing()
    }

    /// Releases the lease, so that another replica need not wait until it expires.
    pub async fn resign(&mut self) -> Result<(), LeaseError> {
        if !self.leads() {
            return Ok(());
        }
        self.election.resign();
        let found = self.with_timeout(self.api.get_opt(&self.name)).await?;
        let Some(found) = found.filter(|lease| read(lease).holder == self.election.identity()) else {
            return Ok(());
        };
        let lease = self.lease("", found.metadata.resource_version, 0);
        self.with_timeout(self.api.replace(&self.name, &PostParams::default(), &lease)).await?;
        Ok(())
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn lease(&self, holder: &str, version: Option<String>, transitions: i32) -> Lease {
        let now = MicroTime(Timestamp::now());
        let duration = i32::try_from(self.election.timing().duration.as_secs()).unwrap_or(i32::MAX);
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
        match tokio::time::timeout(self.election.timing().renew_within / 2, call).await {
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
