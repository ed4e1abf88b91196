//! Filter as the only verb, as gpu-admission is configured: kube-scheduler binds the pod itself, so filter chooses
//! node and GPUs, writes them to the pod and books them.
//!
//! The booking ends when the watch shows the pod on its node, when kube-scheduler filters the pod again because its
//! attempt failed, or after the time that Bindings with an unknown outcome have.

use std::sync::Arc;

use tessera_cluster::{AnnotateError, annotate_pod, with_causes};
use tessera_core::units::PodUid;
use tessera_wire::foreign::extender::BindingArgs;
use tessera_wire::foreign::objects::Pod;

use super::App;
use super::bind::{API_TIMEOUT, BindFailure};
use crate::notices::NoticeReason;
use crate::state::{BindOrder, BindOutcome};
use crate::verb::filter::FilterVerdicts;

/// The reason why no GPUs were reserved. kube-scheduler gets the text and retries the pod.
#[derive(Debug, thiserror::Error)]
enum ReserveFailure {
    #[error(transparent)]
    Booking(#[from] BindFailure),
    #[error("cannot write the chosen GPUs to the pod: {}", with_causes(.0))]
    Annotations(AnnotateError),
    #[error("cannot write the chosen GPUs to the pod: the API server did not answer in time")]
    Timeout,
    #[error("the call was interrupted by an internal error; the log has the cause")]
    Interrupted,
}

/// Narrows the verdicts to the best node and reserves the pod's GPUs there. Without a fitting node nothing changes.
pub(super) async fn reserve(app: &Arc<App>, pod: &Pod, verdicts: &mut FilterVerdicts<'_>) {
    let Some(node) = verdicts.best.filter(|_| pod.spec.asks_for_gpus()) else { return };
    let args = BindingArgs {
        pod_name: pod.metadata.name.clone(),
        pod_namespace: pod.metadata.namespace.clone(),
        pod_uid: pod.metadata.uid.clone(),
        node: node.to_owned(),
    };
    // A separate task, so that the booking is confirmed or released even if kube-scheduler closes the connection.
    let worker = Arc::clone(app);
    let reserved = tokio::spawn(async move { worker.reserve(&args).await }).await;
    match reserved.unwrap_or(Err(ReserveFailure::Interrupted)) {
        Ok(()) => verdicts.narrow_to(node),
        Err(failure) => {
            tracing::info!(%failure, pod = %format_args!("{}/{}", pod.metadata.namespace, pod.metadata.name),
                "no GPUs were reserved; kube-scheduler will retry");
            verdicts.fail(failure.to_string());
        }
    }
}

impl App {
    async fn reserve(&self, args: &BindingArgs) -> Result<(), ReserveFailure> {
        if !self.may_write() {
            return Err(BindFailure::NotLeading.into());
        }
        // An earlier attempt has bound the pod, and kube-scheduler has not seen that yet.
        let Some(BindOrder { annotations, chosen, why }) = self.book(args).await? else { return Ok(()) };
        let uid = PodUid(args.pod_uid.clone());
        let pod = (args.pod_namespace.as_str(), args.pod_name.as_str(), args.pod_uid.as_str());
        let written = annotate_pod(&self.client, pod, &annotations);
        let failure = match self.while_leading(API_TIMEOUT, written).await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(ReserveFailure::Annotations(error)),
            Err(_) => Some(ReserveFailure::Timeout),
        };
        match failure {
            None => {
                self.write().keep_reservation(&uid, self.now());
                self.notify(pod, NoticeReason::GpusChosen, format!("{chosen}: {why}"));
                Ok(())
            }
            // kube-scheduler binds only after an answer without an error, so the GPUs are free whatever was written.
            Some(failure) => {
                self.write().end_bind(&uid, BindOutcome::Refused, self.now());
                Err(failure)
            }
        }
    }
}
