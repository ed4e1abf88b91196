//! A small HTTP client: one connection that is kept, and made anew when it was closed.

use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Request, Uri};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// Talks to one server.
#[derive(Debug)]
pub struct Client {
    host: String,
    connection: Option<SendRequest<Full<Bytes>>>,
}

/// There was no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Not `http://host:port`.
    #[error("{0:?} is no address such as http://127.0.0.1:12345")]
    Address(String),
    /// Nobody listens, or not for long enough.
    #[error("cannot connect to {host}")]
    Connect {
        /// Where to.
        host: String,
        /// Why not.
        source: std::io::Error,
    },
    /// Something that cannot be a request.
    #[error("this cannot be a request")]
    Request(#[from] hyper::http::Error),
    /// The connection broke.
    #[error("the connection broke")]
    Broken(#[from] hyper::Error),
}

impl Client {
    /// For the server at `http://host:port`. Connects with the first request.
    pub fn new(url: &str) -> Result<Self, ClientError> {
        let address = || ClientError::Address(url.to_owned());
        let uri: Uri = url.parse().map_err(|_| address())?;
        let host = uri.authority().filter(|host| host.port().is_some()).ok_or_else(address)?.to_string();
        Ok(Self { host, connection: None })
    }

    /// Sends a request and reads the whole answer: status and body.
    pub async fn send(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Result<(u16, String), ClientError> {
        let mut request = Request::builder().method(method).uri(path).header("host", &self.host);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body.into()))?;
        let mut connection = self.connect().await?;
        let answer = connection.send_request(request).await?;
        let code = answer.status().as_u16();
        let body = answer.into_body().collect().await?.to_bytes();
        self.connection = Some(connection);
        Ok((code, String::from_utf8_lossy(&body).into_owned()))
    }

    async fn connect(&mut self) -> Result<SendRequest<Full<Bytes>>, ClientError> {
        if let Some(mut kept) = self.connection.take()
            && kept.ready().await.is_ok()
        {
            return Ok(kept);
        }
        let no = |source| ClientError::Connect { host: self.host.clone(), source };
        let stream = TcpStream::connect(&self.host).await.map_err(no)?;
        stream.set_nodelay(true).map_err(no)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        tokio::spawn(async move {
            // It ends with the sender, or with the server; whoever sends next will see.
            let _ = connection.await;
        });
        Ok(sender)
    }
}
