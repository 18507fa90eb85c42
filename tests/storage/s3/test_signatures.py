"""A server that checks every signature lets in what each library sends, and nobody with a wrong key."""

import json

import boto3
import pytest

from storage.errors import StoreUnavailable
from storage.store import open_store
from tests.fixtures.rows import append, entry
from tests.fixtures.s3_host import BUCKET, S3Host

pytestmark = pytest.mark.engine

EVERYTHING = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}


@pytest.fixture
def strict():
    """A server that checks signatures, and settings with a key that it has given out."""
    host = S3Host(num_unsigned=4)
    given = {"endpoint_url": host.url, "region_name": "us-east-1", "aws_access_key_id": "a"}
    iam = boto3.client("iam", **given, aws_secret_access_key="b")
    iam.create_user(UserName="user")
    key = iam.create_access_key(UserName="user")["AccessKey"]
    iam.put_user_policy(UserName="user", PolicyName="all", PolicyDocument=json.dumps(EVERYTHING))
    boto3.client("s3", **given, aws_secret_access_key="b").create_bucket(Bucket=BUCKET)
    keys = {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}
    yield host, host.environment | keys
    host.stop()


def test_every_library_signs_what_it_sends(strict):
    host, settings = strict
    place = host.new_place()
    store = open_store(place, settings)
    piece = append(store, 2)
    store.ledger.commit(entry("k", outputs=(piece,)))
    assert store.scan("messages").collect().height == store.read([piece]).num_rows == 2
    scratch = store.policies.scratch("policy")
    (scratch / "model.safetensors").write_bytes(b"weights")
    store.policies.publish(scratch, "policy")
    assert store.policies.remove_unfinished(hours=0) == 0
    store.root.write("odd", b"1")
    odd = "a name &+=b~c(\u00e9)"
    assert store.root.create(odd, b"odd")
    assert store.root.read(odd) == b"odd"
    store.root.delete(odd)
    assert not store.root.exists(odd)
    for wrong in ({"AWS_SECRET_ACCESS_KEY": "wrong"}, {"AWS_ACCESS_KEY_ID": "nobody"}):
        with pytest.raises(StoreUnavailable, match="answered GET with 403"):
            open_store(place, {**settings, **wrong})
