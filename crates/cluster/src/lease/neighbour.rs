//! The lease of another program in the same pod. This replica competes for its own lease only while that program holds
//! the other one, so that one election decides for both.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};

use super::{LeaseError, read};

/// What a replica does about its own lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Take the lease when it is free, and renew it.
    Compete,
    /// Read the lease, but never take it.
    Observe,
    /// Stop leading and release the lease.
    StepDown,
}

/// Decides what to do. `neighbour_leads` is `None` if the replica has no neighbour, and what the last answer about the
/// neighbour's lease said otherwise. Only the replica's own lease says who may write, so an outdated answer delays a
/// takeover, but never makes two leaders.
#[must_use]
pub const fn turn(neighbour_leads: Option<bool>, is_leading: bool) -> Turn {
    match (neighbour_leads, is_leading) {
        (None | Some(true), _) => Turn::Compete,
        (Some(false), true) => Turn::StepDown,
        (Some(false), false) => Turn::Observe,
    }
}

/// The lease of the neighbour.
#[derive(Debug)]
pub struct NeighbourLease {
    api: Api<Lease>,
    name: String,
    host: String,
}

/// Timeout of a read.
const TIMEOUT: Duration = Duration::from_secs(1);

impl NeighbourLease {
    /// Returns the lease `namespace/name`, for which a program on the host of this name competes.
    #[must_use]
    pub fn new(client: Client, namespace: &str, name: &str, host: &str) -> Self {
        let api = Api::namespaced(client, namespace);
        Self { api, name: name.to_owned(), host: host.to_owned() }
    }

    /// Reads whether the neighbour holds the lease. An expired lease counts as held until another program takes it.
    pub async fn is_held(&self) -> Result<bool, LeaseError> {
        match tokio::time::timeout(TIMEOUT, self.api.get_opt(&self.name)).await {
            Ok(Ok(found)) => Ok(found.is_some_and(|lease| is_on_host(&read(&lease).holder, &self.host))),
            Ok(Err(error)) => Err(LeaseError::Api(Box::new(error))),
            Err(_) => Err(LeaseError::Timeout),
        }
    }
}

/// Returns whether the holder of a lease is a program on this host. Programs of Kubernetes name themselves by the
/// host, which is the pod in a pod, and a UUID.
fn is_on_host(holder: &str, host: &str) -> bool {
    !host.is_empty() && holder.rsplit_once('_').is_some_and(|(on, _)| on == host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knows_the_programs_of_its_own_host() {
        let holder = "tessera-scheduler-5d9c-x_7f3e6a0e-0000-4000-8000-000000000000";
        assert!(is_on_host(holder, "tessera-scheduler-5d9c-x"));
        for host in ["", "tessera-scheduler-5d9c", "tessera-scheduler-5d9c-x_7f3e6a0e", "x"] {
            assert!(!is_on_host(holder, host), "{host}");
        }
        assert!(!is_on_host("", "") && !is_on_host("_uuid", "") && !is_on_host("host", "host"));
    }

    #[test]
    fn competes_only_while_the_neighbour_leads() {
        for is_leading in [false, true] {
            assert_eq!(turn(None, is_leading), Turn::Compete);
            assert_eq!(turn(Some(true), is_leading), Turn::Compete);
        }
        assert_eq!(turn(Some(false), false), Turn::Observe);
        assert_eq!(turn(Some(false), true), Turn::StepDown);
    }
}
