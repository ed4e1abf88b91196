//! The parts of pods that name claims.

use serde::{Deserialize, Serialize};

use crate::foreign::objects::{Pod, null_as_default};

/// A claim that a pod uses, in `spec.resourceClaims`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodResourceClaim {
    /// Name in the pod, to which containers refer.
    #[serde(deserialize_with = "null_as_default")]
    pub name: String,
    /// Name of a claim that exists independently of the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_claim_name: Option<String>,
    /// Name of the template from which a claim for this pod is made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_claim_template_name: Option<String>,
}

/// A claim that was made for a pod, in `status.resourceClaimStatuses`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodResourceClaimStatus {
    /// Name in the pod.
    #[serde(deserialize_with = "null_as_default")]
    pub name: String,
    /// Name of the claim, or `None` if the pod needs none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_claim_name: Option<String>,
}

/// The claim that kube-scheduler made for the extended resources of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ExtendedResourceClaimStatus {
    /// Which request of the claim serves which container.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub request_mappings: Vec<ExtendedResourceRequest>,
    /// Name of the claim.
    #[serde(deserialize_with = "null_as_default")]
    pub resource_claim_name: String,
}

/// A request of a claim that serves an extended resource of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ExtendedResourceRequest {
    /// Name of the container.
    #[serde(deserialize_with = "null_as_default")]
    pub container_name: String,
    /// Name of the resource, such as `nvidia.com/gpu`.
    #[serde(deserialize_with = "null_as_default")]
    pub resource_name: String,
    /// Name of the request in the claim.
    #[serde(deserialize_with = "null_as_default")]
    pub request_name: String,
}

/// A claim that a container uses, in `resources.claims`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ContainerClaim {
    /// Name of the claim in the pod.
    #[serde(deserialize_with = "null_as_default")]
    pub name: String,
    /// Name of the only request that the container uses, or `None` for all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<String>,
}

/// The claim behind a name in a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ClaimName<'a> {
    /// A claim with this name in the namespace of the pod.
    Known(&'a str),
    /// A claim that the controller manager has not made yet from this template.
    Pending(&'a str),
}

/// Requests of a claim that a container uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimedRequest<'a> {
    /// Name of the container.
    pub container: &'a str,
    /// Name of the claim in the namespace of the pod.
    pub claim: &'a str,
    /// Name of the only request that the container uses, or `None` for all.
    pub request: Option<&'a str>,
}

// === impl Pod ===

impl Pod {
    /// Returns the claims of the pod: those that it names, those made from templates, and the one that
    /// kube-scheduler made for extended resources. A template whose claim the pod does not need is left out.
    pub fn claim_names(&self) -> impl Iterator<Item = ClaimName<'_>> {
        let own = self.spec.resource_claims.iter().filter_map(|claim| self.claim_behind(claim));
        let extended = self.status.extended_resource_claim_status.iter();
        own.chain(extended.map(|status| ClaimName::Known(&status.resource_claim_name)))
    }

    /// Returns which containers use which requests of which claims. Claims that do not exist yet are left out.
    pub fn claimed_requests(&self) -> impl Iterator<Item = ClaimedRequest<'_>> {
        let containers = self.spec.init_containers.iter().chain(&self.spec.containers);
        let own = containers.flat_map(|container| {
            container.resources.claims.iter().filter_map(|used| {
                let claim = self.spec.resource_claims.iter().find(|claim| claim.name == used.name)?;
                match self.claim_behind(claim)? {
                    ClaimName::Known(claim) => Some(ClaimedRequest {
                        container: &container.name,
                        claim,
                        request: used.request.as_deref(),
                    }),
                    ClaimName::Pending(_) => None,
                }
            })
        });
        let extended = self.status.extended_resource_claim_status.iter().flat_map(|status| {
            status.request_mappings.iter().map(|mapping| ClaimedRequest {
                container: &mapping.container_name,
                claim: &status.resource_claim_name,
                request: Some(&mapping.request_name),
            })
        });
        own.chain(extended)
    }

    fn claim_behind<'a>(&'a self, claim: &'a PodResourceClaim) -> Option<ClaimName<'a>> {
        if let Some(name) = &claim.resource_claim_name {
            return Some(ClaimName::Known(name));
        }
        let template = claim.resource_claim_template_name.as_deref().unwrap_or_default();
        match self.status.resource_claim_statuses.iter().find(|status| status.name == claim.name) {
            None => Some(ClaimName::Pending(template)),
            Some(status) => status.resource_claim_name.as_deref().map(ClaimName::Known),
        }
    }
}
