//! One leader among several replicas, by a Lease object.

mod election;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};

use crate::causes::innermost;

pub use self::election::{Election, Found, Step, Timing};

/// The lease could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// The API server refused.
    #[error("{}", innermost(.0))]
    Api(Box<kube::Error>),
    /// It did not answer in time.
    #[error("the API server did not answer about the lease in time")]
    Timeout,
}

/// A candidate for a Lease object.
#[derive(Debug)]
pub struct Candidate {
    api: Api<Lease>,
    name: String,
    election: Election,
    started: Instant,
    notes: BTreeMap<String, String>,
}

impl Candidate {
    /// A candidate for the lease of this name.
    #[must_use]
    pub fn new(client: Client, namespace: &str, name: &str, identity: String, timing: Timing) -> Self {
        let api = Api::namespaced(client, namespace);
        let election = Election::new(identity, timing);
        Self { api, name: name.to_owned(), election, started: Instant::now(), notes: BTreeMap::new() }
    }

    /// The same candidate, telling by annotations of the lease what it goes by while it leads.
    #[must_use]
    pub fn telling(mut self, notes: BTreeMap<String, String>) -> Self {
        self.notes = notes;
        self
    }

    /// Looks at the lease and takes or renews it where that is due. Returns whether we lead now.
    pub async fn poll(&mut self) -> Result<bool, LeaseError> {
        let begun = self.now();
        let found = self.timely(self.api.get_opt(&self.name)).await?;
        let transitions =
            found.as_ref().and_then(|lease| lease.spec.as_ref()?.lease_transitions).unwrap_or(0);
        let read = found.as_ref().map(read);
        let is_ours = read.as_ref().is_some_and(|found| found.holder == self.election.identity());
        if let Step::Take(version) = self.election.look(begun, read) {
            let transitions = if is_ours { transitions } else { transitions.saturating_add(1) };
            let lease = self.lease(self.election.identity(), version.clone(), transitions);
            let post = PostParams::default();
            let written = match version {
                None => self.timely(self.api.create(&post, &lease)).await,
                Some(_) => self.timely(self.api.replace(&self.name, &post, &lease)).await,
            };
            match written {
                Ok(_) => self.election.taken(begun),
                // Somebody was faster: look again next time.
                Err(LeaseError::Api(error)) if matches!(&*error, kube::Error::Api(status) if status.code == 409) =>
                    {}
                Err(error) => return Err(error),
            }
        }
        Ok(self.leads())
    }

    /// Whether we lead at this moment.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.election.leads(self.now())
    }

    /// Grows whenever we come to lead after somebody else may have led.
    #[must_use]
    pub fn term(&self) -> u64 {
        self.election.term()
    }

    /// Who else leads, as last seen.
    #[must_use]
    pub fn other_leader(&self) -> Option<&str> {
        self.election.other_holder()
    }

    /// Until when we lead if nothing more succeeds.
    #[must_use]
    pub fn timing(&self) -> Timing {
        self.election.timing()
    }

    /// Gives the lease back, so that nobody has to wait for it to run out.
    pub async fn resign(&mut self) -> Result<(), LeaseError> {
        if !self.leads() {
            return Ok(());
        }
        self.election.resign();
        let found = self.timely(self.api.get_opt(&self.name)).await?;
        let Some(found) = found.filter(|lease| read(lease).holder == self.election.identity()) else {
            return Ok(());
        };
        let lease = self.lease("", found.metadata.resource_version, 0);
        self.timely(self.api.replace(&self.name, &PostParams::default(), &lease)).await?;
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
                annotations: (!self.notes.is_empty()).then(|| self.notes.clone()),
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

    async fn timely<T>(&self, call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, LeaseError> {
        match tokio::time::timeout(self.election.timing().renew_within / 2, call).await {
            Ok(outcome) => outcome.map_err(|error| LeaseError::Api(Box::new(error))),
            Err(_) => Err(LeaseError::Timeout),
        }
    }
}

fn read(lease: &Lease) -> Found {
    let spec = lease.spec.clone().unwrap_or_default();
    let seconds = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
    Found {
        holder: spec.holder_identity.unwrap_or_default(),
        version: lease.metadata.resource_version.clone().unwrap_or_default(),
        duration: Duration::from_secs(seconds.unwrap_or(15)),
    }
}
