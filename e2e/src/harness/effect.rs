//! Waits until the API server acts on objects that a scenario has created.
//!
//! The API server admits and authorises requests by its own caches, which follow the objects after a
//! moment. On a busy host that moment is long enough for the next request to miss them.

use std::time::Duration;

use anyhow::{Result, ensure};
use axum::http::Request;
use k8s_openapi::api::{
    authorization::v1::{
        NonResourceAttributes, ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
    },
    core::v1::Pod,
    rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding, RoleRef, Subject},
    scheduling::v1::PriorityClass,
};
use kube::{
    Api, Client,
    api::{ListParams, ObjectMeta, PostParams},
};
use serde_json::Value;

use super::{Cluster, pod};

/// Longest time until a cache of the API server has an object. It is a second on an idle host.
const SOON: Duration = Duration::from_secs(60);

impl Cluster {
    /// Creates a priority class and waits until pods can use it.
    pub(crate) async fn create_priority_class(&self, name: &str, value: i32) -> Result<()> {
        let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
        let class = PriorityClass { metadata, value, ..PriorityClass::default() };
        Api::all(self.client()).create(&PostParams::default(), &class).await?;
        self.wait_for_priority_class(name).await
    }

    /// Waits until the API server admits pods of a priority class.
    pub(crate) async fn wait_for_priority_class(&self, name: &str) -> Result<()> {
        let mut probe: Pod = pod("probe-of-priority", "true", &[]);
        probe.spec.get_or_insert_default().priority_class_name = Some(name.to_owned());
        let try_only = PostParams { dry_run: true, ..PostParams::default() };
        self.harness
            .wait_for(&format!("pods of priority class {name} to be admitted"), SOON, async || {
                Ok(Some(self.pods().create(&try_only, &probe).await?))
            })
            .await?;
        Ok(())
    }

    /// Waits until a user has all rights of its role bindings. A service account is named
    /// `system:serviceaccount:NAMESPACE:NAME`.
    pub(crate) async fn wait_for_rights(&self, user: &str) -> Result<()> {
        let mut reviews = Vec::new();
        for (namespace, role) in self.roles_of(user).await? {
            let rules = self.rules_of(namespace.as_deref(), &role).await?;
            reviews.extend(rules.iter().flat_map(|rule| reviews_of(user, namespace.as_deref(), rule)));
        }
        ensure!(!reviews.is_empty(), "no role is bound to {user}");
        let api: Api<SubjectAccessReview> = Api::all(self.client());
        for spec in reviews {
            let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
            self.harness
                .wait_for(&format!("the right of {:?}", review.spec), SOON, async || {
                    let answer = api.create(&PostParams::default(), &review).await?;
                    Ok(answer.status.is_some_and(|status| status.allowed).then_some(()))
                })
                .await?;
        }
        Ok(())
    }

    /// Waits until the API server refuses a request with this text. The request is sent as a dry
    /// run, so it changes nothing before that.
    pub(crate) async fn wait_for_refusal(
        &self,
        client: &Client,
        request: Request<Vec<u8>>,
        text: &str,
    ) -> Result<()> {
        let (mut parts, body) = request.into_parts();
        parts.uri = format!("{}?dryRun=All", parts.uri).parse()?;
        self.harness
            .wait_for(&format!("{} {} to be refused: {text}", parts.method, parts.uri), SOON, async || {
                let refused =
                    match client.request::<Value>(Request::from_parts(parts.clone(), body.clone())).await {
                        Err(kube::Error::Api(status)) => status.message.contains(text),
                        Err(error) => return Err(error.into()),
                        Ok(_) => false,
                    };
                Ok(refused.then_some(()))
            })
            .await
    }

    /// Returns the roles that are bound to a user, each with the namespace of its binding.
    async fn roles_of(&self, user: &str) -> Result<Vec<(Option<String>, RoleRef)>> {
        let (client, all) = (self.client(), ListParams::default());
        let everywhere = Api::<ClusterRoleBinding>::all(client.clone()).list(&all).await?.items;
        let within = Api::<RoleBinding>::all(client).list(&all).await?.items;
        let is_bound = |subjects: &Option<Vec<Subject>>| {
            subjects.iter().flatten().any(|subject| user_name(subject) == user)
        };
        let everywhere = everywhere
            .into_iter()
            .filter(|binding| is_bound(&binding.subjects))
            .map(|binding| (None, binding.role_ref));
        let within = within
            .into_iter()
            .filter(|binding| is_bound(&binding.subjects))
            .map(|binding| (binding.metadata.namespace, binding.role_ref));
        Ok(everywhere.chain(within).collect())
    }

    async fn rules_of(&self, namespace: Option<&str>, role: &RoleRef) -> Result<Vec<PolicyRule>> {
        let rules = match namespace {
            Some(namespace) if role.kind == "Role" => {
                Api::<Role>::namespaced(self.client(), namespace).get(&role.name).await?.rules
            }
            _ => Api::<ClusterRole>::all(self.client()).get(&role.name).await?.rules,
        };
        Ok(rules.unwrap_or_default())
    }
}

/// Returns the user name of the subject of a role binding.
pub(super) fn user_name(subject: &Subject) -> String {
    match &subject.namespace {
        Some(namespace) => format!("system:serviceaccount:{namespace}:{}", subject.name),
        None => subject.name.clone(),
    }
}

/// Returns one review for each right of a rule.
fn reviews_of(user: &str, namespace: Option<&str>, rule: &PolicyRule) -> Vec<SubjectAccessReviewSpec> {
    let of_user = SubjectAccessReviewSpec { user: Some(user.to_owned()), ..Default::default() };
    // A rule without names covers all objects.
    let names = match rule.resource_names.as_deref() {
        None | Some([]) => vec![None],
        Some(names) => names.iter().cloned().map(Some).collect(),
    };
    let mut reviews = Vec::new();
    for verb in &rule.verbs {
        for group in rule.api_groups.iter().flatten() {
            for resource in rule.resources.iter().flatten() {
                let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
                for name in &names {
                    let attributes = ResourceAttributes {
                        namespace: namespace.map(str::to_owned),
                        verb: Some(verb.clone()),
                        group: Some(group.clone()),
                        resource: Some(resource.to_owned()),
                        subresource: Some(subresource.to_owned()),
                        name: name.clone(),
                        ..ResourceAttributes::default()
                    };
                    reviews.push(SubjectAccessReviewSpec {
                        resource_attributes: Some(attributes),
                        ..of_user.clone()
                    });
                }
            }
        }
        for path in rule.non_resource_urls.iter().flatten() {
            let attributes = NonResourceAttributes { path: Some(path.clone()), verb: Some(verb.clone()) };
            reviews.push(SubjectAccessReviewSpec {
                non_resource_attributes: Some(attributes),
                ..of_user.clone()
            });
        }
    }
    reviews
}
