//! Binds a pod with claims: reads pod and claims from the API server, books the claims, corrects those whose GPUs are
//! replaced, and sends the Binding.
//!
//! A correction takes two writes, each with the resource version of the claim. If the scheduler ends between them, the
//! claim is merely unallocated: kube-scheduler allocates it in its next attempt.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;

use serde_json::Value;
use tessera_cluster::{ApiError, claims};
use tessera_core::gpu_set::GpuSet;
use tessera_core::units::NodeName;
use tessera_wire::foreign::dra::{ClaimName, ResourceClaim};
use tessera_wire::foreign::extender::BindingArgs;
use tessera_wire::foreign::objects::Pod;
use tessera_wire::tessera::dra::{cleared, reallocated};

use super::bind::{API_TIMEOUT, BindFailure};
use super::{App, RequestAborted};
use crate::notices::NoticeReason;
use crate::state::{BindOrder, BindOutcome, BindRefusal, ClaimOutcome, ClaimPlan, ClaimRefusal};

/// The reason why a claim was not read or corrected.
#[derive(Debug, thiserror::Error)]
pub(super) enum ClaimFailure {
    #[error("cannot read claim {claim}: {source}")]
    Read { claim: String, source: ApiError },
    #[error("cannot read claim {0}: the API server did not answer in time")]
    ReadTimeout(String),
    #[error("cannot parse claim {claim}: {source}")]
    Object { claim: String, source: serde_json::Error },
    #[error("cannot write the GPUs of claim {claim}: {source}; kube-scheduler retries the pod")]
    Write { claim: String, source: ApiError },
    #[error("cannot write the GPUs of claim {claim}: {source}; kube-scheduler retries the pod")]
    Aborted { claim: String, source: RequestAborted },
    #[error("the allocation of claim {0} has no place for the chosen GPUs; kube-scheduler retries the pod")]
    Shape(String),
}

/// A claim as read, and as it is edited.
struct ReadClaim {
    raw: Value,
    claim: ResourceClaim,
}

impl App {
    /// Binds a pod that uses claims, or that asks for no GPUs at all. Returns `None` for a pod that asks for GPUs by
    /// resources alone.
    pub(super) async fn bind_with_claims(&self, args: &BindingArgs) -> Result<Option<String>, BindFailure> {
        let pod = self.fetch(args).await?;
        let names = claim_names(&pod)?;
        if names.is_empty() && pod.spec.names_gpu_resources() {
            return Ok(None);
        }
        self.read().check_pod(args, &pod)?;
        if pod.spec.node_name == args.node {
            return Ok(Some(String::new()));
        }
        let mut read = Vec::new();
        for name in names {
            read.push(self.read_claim(args, &name).await?);
        }
        let claims: Vec<ResourceClaim> = read.iter().map(|read| read.claim.clone()).collect();
        let booked = self.write().book_claims(args, &pod, &claims, self.now());
        if let Err(refusal) = &booked {
            self.notify_refusal(args, &claims, refusal);
        }
        let plans = booked?;
        let outcome = self.bind_booked(args, &pod, &read, &plans).await;
        if !matches!(outcome, Err(BindFailure::Claim(_))) {
            plans.iter().for_each(|plan| self.write().end_claim(&plan.uid, ClaimOutcome::Kept, self.now()));
        }
        outcome.map(Some)
    }

    /// Writes an event about the claim for which a pod is not bound.
    fn notify_refusal(&self, args: &BindingArgs, claims: &[ResourceClaim], refusal: &ClaimRefusal) {
        let refused = claims.iter().find(|claim| refusal.claim() == Some(&claim.metadata.name));
        if let Some(ResourceClaim { metadata, .. }) = refused {
            let message = format!("pod {} is not bound to node {}: {refusal}", args.pod_name, args.node);
            let claim = (&*metadata.namespace, &*metadata.name, &*metadata.uid);
            self.notify_claim(claim, NoticeReason::ClaimRefused, message);
        }
    }

    async fn bind_booked(
        &self,
        args: &BindingArgs,
        pod: &Pod,
        read: &[ReadClaim],
        plans: &[ClaimPlan],
    ) -> Result<String, BindFailure> {
        self.correct_all(args, read, plans).await?;
        let is_by_claim = pod.status.extended_resource_claim_status.is_some();
        let by_resources = pod.spec.asks_for_gpus() && !is_by_claim;
        let order = if by_resources { self.book(args).await? } else { Some(BindOrder::default()) };
        let Some(order) = order else { return Ok(String::new()) };
        self.wait_until(order.not_before).await;
        if !self.may_write() {
            self.end_pod_booking(args, by_resources, BindOutcome::Refused);
            return Err(BindFailure::NotLeading);
        }
        let (outcome, failure) = self.send(args, order.annotations).await;
        self.end_pod_booking(args, by_resources, outcome);
        let (chosen, why) = describe(args, plans);
        if !plans.is_empty() {
            let error = failure.as_ref().map(ToString::to_string).unwrap_or_default();
            self.notify_outcome(args, outcome, format!("{chosen}: {why}"), &error);
        }
        failure.map_or(Ok(why), Err)
    }

    fn end_pod_booking(&self, args: &BindingArgs, is_booked: bool, outcome: BindOutcome) {
        self.metrics.bound(match outcome {
            BindOutcome::Bound => "bound",
            BindOutcome::Refused => "refused",
            BindOutcome::Unknown => "unknown",
        });
        if is_booked {
            self.write().end_bind(&tessera_core::units::PodUid(args.pod_uid.clone()), outcome, self.now());
        }
    }

    async fn read_claim(&self, args: &BindingArgs, name: &str) -> Result<ReadClaim, ClaimFailure> {
        let claim = || format!("{}/{name}", args.pod_namespace);
        let asked = claims::read(&self.client, &args.pod_namespace, name);
        let raw = match tokio::time::timeout(API_TIMEOUT, asked).await {
            Ok(Ok(raw)) => raw,
            Ok(Err(source)) => return Err(ClaimFailure::Read { claim: claim(), source }),
            Err(_) => return Err(ClaimFailure::ReadTimeout(claim())),
        };
        let parsed = serde_json::from_value(raw.clone());
        let parsed = parsed.map_err(|source| ClaimFailure::Object { claim: claim(), source })?;
        Ok(ReadClaim { raw, claim: parsed })
    }

    /// Writes the GPUs of the claims that are replaced. After a failure the bookings of claims that were not written are
    /// dropped, and the others stay until the watch shows what became of them.
    async fn correct_all(
        &self,
        args: &BindingArgs,
        read: &[ReadClaim],
        plans: &[ClaimPlan],
    ) -> Result<(), ClaimFailure> {
        for (position, plan) in plans.iter().enumerate() {
            let Some(why) = plan.replaced else { continue };
            let found = read.iter().find(|read| read.claim.metadata.uid == plan.uid.0);
            let Some(claim) = found else { continue };
            let name = &claim.claim.metadata.name;
            tracing::info!(pod = %format_args!("{}/{}", args.pod_namespace, args.pod_name), claim = name, %why,
                "replacing the GPUs of the claim");
            if let Err((failure, outcome)) = self.correct(args, claim, plan).await {
                let now = self.now();
                let mut state = self.write();
                for (other, plan) in plans.iter().enumerate() {
                    let is_written = other < position && plan.replaced.is_some();
                    let outcome = if other == position {
                        outcome
                    } else if is_written || plan.replaced.is_none() {
                        ClaimOutcome::Kept
                    } else {
                        ClaimOutcome::Unwritten
                    };
                    state.end_claim(&plan.uid, outcome, now);
                }
                return Err(failure);
            }
            self.metrics.claim_replaced(why);
            let message = format!("{why}: {} for pod {}", gpus_of(args, [plan]), args.pod_name);
            self.notify_claim((&args.pod_namespace, name, &plan.uid.0), NoticeReason::GpusReplaced, message);
        }
        Ok(())
    }

    /// Clears the allocation, then sets it anew with the chosen GPUs.
    async fn correct(
        &self,
        args: &BindingArgs,
        read: &ReadClaim,
        plan: &ClaimPlan,
    ) -> Result<(), (ClaimFailure, ClaimOutcome)> {
        let name = &read.claim.metadata.name;
        let shape = || (ClaimFailure::Shape(name.clone()), ClaimOutcome::Unwritten);
        // The second write must be possible before the first one is made.
        reallocated(&read.raw, &read.raw, &plan.parts, String::new).ok_or_else(shape)?;
        let current = self.write_claim(args, name, &cleared(&read.raw)).await?;
        let written = reallocated(&current, &read.raw, &plan.parts, new_share_id).ok_or_else(shape)?;
        // After the first write the claim has no GPUs, whatever becomes of the second one.
        let kept = |(failure, _)| (failure, ClaimOutcome::Kept);
        self.write_claim(args, name, &written).await.map(drop).map_err(kept)
    }

    async fn write_claim(
        &self,
        args: &BindingArgs,
        name: &str,
        claim: &Value,
    ) -> Result<Value, (ClaimFailure, ClaimOutcome)> {
        let request = claims::write_status(&self.client, &args.pod_namespace, name, claim);
        let name = name.to_owned();
        match self.while_leading(API_TIMEOUT, request).await {
            Ok(Ok(written)) => Ok(written),
            Ok(Err(source @ ApiError::Refused { .. })) => {
                Err((ClaimFailure::Write { claim: name, source }, ClaimOutcome::Unwritten))
            }
            Ok(Err(source)) => Err((ClaimFailure::Write { claim: name, source }, ClaimOutcome::Kept)),
            Err(source) => Err((ClaimFailure::Aborted { claim: name, source }, ClaimOutcome::Kept)),
        }
    }
}

/// Returns the names of the pod's claims, each once.
fn claim_names(pod: &Pod) -> Result<Vec<String>, BindFailure> {
    let mut names = Vec::new();
    for name in pod.claim_names() {
        match name {
            ClaimName::Known(name) if names.iter().any(|known| known == name) => {}
            ClaimName::Known(name) => names.push(name.to_owned()),
            ClaimName::Pending(template) => {
                return Err(ClaimRefusal::Pending(template.to_owned()).into());
            }
        }
    }
    Ok(names)
}

/// Returns the GPUs of all claims as text, and the reason for them.
fn describe(args: &BindingArgs, plans: &[ClaimPlan]) -> (String, String) {
    let chosen = gpus_of(args, plans);
    let replaced = plans.iter().find_map(|plan| plan.replaced);
    let why = replaced.map_or_else(|| "as kube-scheduler allocated".to_owned(), |why| why.to_string());
    (chosen, why)
}

/// Returns the GPUs of claims as text.
fn gpus_of<'a>(args: &BindingArgs, plans: impl IntoIterator<Item = &'a ClaimPlan>) -> String {
    let gpus: GpuSet =
        plans.into_iter().flat_map(|plan| &plan.parts).flat_map(|part| part.gpus.clone()).collect();
    format!("GPU {gpus} of node {}", NodeName(args.node.clone()))
}

/// Returns an identity for a share, in the form of a random UUID.
fn new_share_id() -> String {
    let random = || RandomState::new().hash_one(std::time::Instant::now());
    let (high, low) = (random(), random());
    format!(
        "{:08x}-{:04x}-4{:03x}-{:04x}-{:012x}",
        high >> 32,
        (high >> 16) & 0xffff,
        high & 0xfff,
        0x8000 | (low >> 48) & 0x3fff,
        low & 0xffff_ffff_ffff
    )
}

impl From<ClaimRefusal> for BindFailure {
    fn from(refusal: ClaimRefusal) -> Self {
        match refusal {
            ClaimRefusal::Bind(refusal) => Self::Refused(refusal),
            other => Self::Claims(Box::new(other)),
        }
    }
}

impl App {
    /// Returns whether a bind must read the pod and its claims.
    pub(super) fn may_use_claims(&self, args: &BindingArgs) -> bool {
        self.read().may_use_claims(args)
    }
}

impl crate::state::State {
    /// Checks that the pod is ours to bind to this node.
    fn check_pod(&self, args: &BindingArgs, pod: &Pod) -> Result<(), BindRefusal> {
        let uid = tessera_core::units::PodUid(args.pod_uid.clone());
        self.check_scheduler(&uid, &pod.spec)?;
        let node = &pod.spec.node_name;
        if node.is_empty() || *node == args.node {
            return Ok(());
        }
        Err(BindRefusal::Elsewhere { pod: uid, node: NodeName(node.clone()) })
    }
}
