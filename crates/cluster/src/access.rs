//! Checks who may read HTTP pages: the API server says whom a token belongs to (TokenReview) and what this user may
//! read (SubjectAccessReview). [`table`] decides when it is asked.

mod budget;
pub mod table;

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http::StatusCode;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};
use sha2::{Digest as _, Sha256};

use self::table::{AccessKey, AccessTable, Caller, Outcome, Step, is_token};
use crate::causes::{FailureLog, innermost};

/// Timeout of a review. The reader of the page waits meanwhile.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(3);

/// Pages and the right to read them.
#[derive(Clone, Copy, Debug)]
pub struct Protection {
    /// Audience of tokens that are made for these pages. Tokens for the API server are accepted too.
    pub audience: &'static str,
    /// Name of the ClusterRole that permits to read the pages.
    pub role: &'static str,
}

/// The reason why a request gets no page, with the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// The request has no token.
    #[error(
        "this page needs a token of Kubernetes: send the header `Authorization: Bearer TOKEN`; `kubectl create token \
         ACCOUNT` makes one for a service account, which needs the ClusterRole {role}"
    )]
    NoToken {
        /// Name of the ClusterRole.
        role: &'static str,
    },
    /// The text has characters that no token has, or is too long.
    #[error("the text after `Bearer` cannot be a token of Kubernetes")]
    NotAToken,
    /// The API server does not accept the token.
    #[error(
        "the API server does not accept this token: it has expired, belongs to another cluster, or is for another \
         audience than {audience} and the API server; make a new one, for example with `kubectl create token ACCOUNT`"
    )]
    Unauthenticated {
        /// Audience of the pages.
        audience: &'static str,
    },
    /// The user has no right to read the page.
    #[error(
        "user {user} may not get the non-resource URL {path}; bind the ClusterRole {role}: \
         kubectl create clusterrolebinding NAME --clusterrole={role} {}",
        subject(user)
    )]
    Forbidden {
        /// Name of the user.
        user: String,
        /// Path of the page, as in the role.
        path: &'static str,
        /// Name of the ClusterRole.
        role: &'static str,
    },
    /// Too many tokens have to be reviewed.
    #[error("too many tokens are being checked; try again in a few seconds")]
    Busy,
    /// The API server gave no answer.
    #[error("the API server cannot be asked whether this token may read the page: {0}")]
    Unavailable(String),
}

impl Denied {
    /// Returns the status code of the answer.
    #[must_use]
    pub fn code(&self) -> StatusCode {
        match self {
            Self::NoToken { .. } | Self::NotAToken | Self::Unauthenticated { .. } => StatusCode::UNAUTHORIZED,
            Self::Forbidden { .. } => StatusCode::FORBIDDEN,
            Self::Busy => StatusCode::TOO_MANY_REQUESTS,
            Self::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

/// Returns the argument of `kubectl create clusterrolebinding` for a user.
fn subject(user: &str) -> String {
    match user.strip_prefix("system:serviceaccount:") {
        Some(account) => format!("--serviceaccount={account}"),
        None => format!("--user={user}"),
    }
}

/// Lets callers in whose token has the right to read a page.
pub struct Gate {
    client: Client,
    protection: Protection,
    table: Mutex<AccessTable>,
    failures: Mutex<FailureLog>,
    started: Instant,
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate").field("protection", &self.protection).finish_non_exhaustive()
    }
}

impl Gate {
    /// Returns a gate that asks the API server of this client.
    #[must_use]
    pub fn new(client: Client, protection: Protection) -> Self {
        Self {
            client,
            protection,
            table: Mutex::default(),
            failures: Mutex::default(),
            started: Instant::now(),
        }
    }

    /// Checks a request from `peer` for `path`, the non-resource URL of the page in roles.
    pub async fn check(
        self: &Arc<Self>,
        peer: IpAddr,
        token: Option<&str>,
        path: &'static str,
    ) -> Result<(), Denied> {
        let Protection { audience, role } = self.protection;
        let token = token.ok_or(Denied::NoToken { role })?;
        if !is_token(token) {
            return Err(Denied::NotAToken);
        }
        let key = key(token, path);
        let step = self.table().begin(self.started.elapsed(), key, peer);
        let outcome = match step {
            Step::Answer(outcome) => outcome,
            Step::Busy => return Err(Denied::Busy),
            Step::Review(caller) => {
                // The review ends and is counted as ended, even if the caller closes the connection.
                let (gate, token) = (Arc::clone(self), token.to_owned());
                let review = tokio::spawn(async move { gate.review((key, peer), caller, token, path).await });
                review.await.map_err(|panicked| Denied::Unavailable(panicked.to_string()))??
            }
        };
        match outcome {
            Outcome::Allowed => Ok(()),
            Outcome::Unauthenticated => Err(Denied::Unauthenticated { audience }),
            Outcome::Forbidden(user) => Err(Denied::Forbidden { user, path, role }),
        }
    }

    fn table(&self) -> MutexGuard<'_, AccessTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn review(
        &self,
        request: (AccessKey, IpAddr),
        caller: Caller,
        token: String,
        path: &'static str,
    ) -> Result<Outcome, Denied> {
        let reviewed = tokio::time::timeout(REVIEW_TIMEOUT, self.ask(token, path)).await;
        let (outcome, failure) = match reviewed {
            Ok(Ok(outcome)) => (Some(outcome), None),
            Ok(Err(error)) => (None, Some(explained(&error))),
            Err(_) => (None, Some(format!("no answer within {REVIEW_TIMEOUT:?}"))),
        };
        self.log(failure.as_deref());
        let outcome = self.table().finish(self.started.elapsed(), request, caller, outcome);
        outcome.ok_or_else(|| Denied::Unavailable(failure.unwrap_or_default()))
    }

    fn log(&self, failure: Option<&str>) {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        match failure {
            Some(error) if failures.record(error) => tracing::warn!(
                error,
                "cannot ask the API server who may read the pages; callers that it allowed before go on, others get 503"
            ),
            None if failures.clear() => tracing::info!("the API server answers again who may read the pages"),
            _ => {}
        }
    }

    async fn ask(&self, token: String, path: &str) -> Result<Outcome, kube::Error> {
        let audience = self.protection.audience.to_owned();
        let user = match self.user_of(&token, Some(audience)).await? {
            Some(user) => Some(user),
            None => self.user_of(&token, None).await?,
        };
        let Some(UserInfo { extra, groups, uid, username }) = user else {
            return Ok(Outcome::Unauthenticated);
        };
        let (path, verb) = (Some(path.to_owned()), Some("get".to_owned()));
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                extra,
                groups,
                uid,
                user: username.clone(),
                non_resource_attributes: Some(NonResourceAttributes { path, verb }),
                resource_attributes: None,
            },
            ..SubjectAccessReview::default()
        };
        let reviews: Api<SubjectAccessReview> = Api::all(self.client.clone());
        let status = reviews.create(&PostParams::default(), &review).await?.status;
        let is_allowed = status.is_some_and(|status| status.allowed && status.denied != Some(true));
        Ok(if is_allowed { Outcome::Allowed } else { Outcome::Forbidden(username.unwrap_or_default()) })
    }

    /// Returns the user of a token for this audience, or for the API server's own. `None` if it is not valid for it.
    async fn user_of(&self, token: &str, audience: Option<String>) -> Result<Option<UserInfo>, kube::Error> {
        let audiences = audience.map(|audience| vec![audience]);
        let spec = TokenReviewSpec { audiences: audiences.clone(), token: Some(token.to_owned()) };
        let review = TokenReview { spec, ..TokenReview::default() };
        let reviews: Api<TokenReview> = Api::all(self.client.clone());
        let status = reviews.create(&PostParams::default(), &review).await?.status.unwrap_or_default();
        // An authenticator that does not know audiences accepts any token and returns none.
        let has_audience = audiences.is_none_or(|wanted| status.audiences.unwrap_or_default() == wanted);
        Ok(status.user.filter(|_| status.authenticated == Some(true) && has_audience))
    }
}

/// Returns the cause of a failed review, with the remedy where a right is missing.
fn explained(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) if status.code == 403 => format!(
            "{}; this program needs the right to create tokenreviews and subjectaccessreviews, which the rbac.yaml of \
             its manifests gives",
            status.message
        ),
        _ => innermost(error),
    }
}

fn key(token: &str, path: &str) -> AccessKey {
    // No token contains a space, so different pairs have different texts.
    AccessKey(Sha256::new().chain_update(token).chain_update(" ").chain_update(path).finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_command_that_helps() {
        let of = |user: &str| {
            Denied::Forbidden { user: user.to_owned(), path: "/metrics", role: "reader" }.to_string()
        };
        let command = "kubectl create clusterrolebinding NAME --clusterrole=reader";
        assert!(of("system:serviceaccount:a:b").ends_with(&format!("{command} --serviceaccount=a:b")));
        assert!(of("jane").ends_with(&format!("{command} --user=jane")));
    }

    #[test]
    fn keys_differ_by_token_and_path() {
        assert_eq!(key("a", "/b"), key("a", "/b"));
        assert!(
            key("a", "/b") != key("a/", "b")
                && key("a", "/b") != key("a", "/c")
                && key("a", "/b") != key("c", "/b")
        );
    }
}
