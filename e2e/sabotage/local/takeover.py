"""Apply children over the objects of other owners."""

from ballast_operator import cluster


async def apply(self, key, manifest, *, uid):
    del uid
    return await self._patch("apply", key, manifest, cluster.APPLY, query={"force": "true"} | cluster.STRICT)


cluster.Cluster.apply = apply
