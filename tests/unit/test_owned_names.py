"""Names that callers give belong to them: no name of one caller is ever that of another."""

from hypothesis import example, given
from hypothesis import strategies as st

from runtime.keys import TENANT, owned, owner, plain

TENANTS = st.just("") | st.from_regex(TENANT, fullmatch=True)
NAMES = st.text("@/ab", max_size=8) | st.text(max_size=8)


@given(TENANTS, NAMES)
@example("", "@alice/resp_1")
@example("bob", "@alice/resp_1")
@example("bob", "home/bob")
def test_a_name_and_its_tenant_are_found_again(tenant: str, name: str):
    known_by = owned(tenant, name)
    assert (owner(known_by), plain(known_by)) == (tenant, name)
